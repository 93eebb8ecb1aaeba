"""`lockstep.spawn` from scripts, from a notebook's kind of process, and on what counts as several
machines.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.launch.spawn import _check_environment, spawn
from lockstep.machine.processes import is_running
from tests.forked import Forked
from tests.launch.shared import Ended, environment, finish, wait_for
from tests.sampled import quick_and_full

_SCRIPT = """
import json, os, sys, time
import lockstep

def place(folder):
    open(f"{folder}/{os.environ['RANK']}", "w").write(json.dumps(
        {name: os.environ[name] for name in ("LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")}))

def fails():
    if os.environ["RANK"] == "1":
        raise ValueError("the loss is not a number")
    time.sleep(600)

def dies():
    if os.environ["RANK"] == "1":
        os._exit(3)
    time.sleep(600)

def refuses():
    raise lockstep.UsageError("bad mesh", fix="a better one")

def error_of(function):
    since = time.monotonic()
    try:
        lockstep.spawn(function, nprocs=2)
    except lockstep.LockstepError as error:
        return [type(error).__name__, str(error), time.monotonic() - since]

if __name__ == "__main__":
    os.mkdir("one"); lockstep.spawn(place, ("one",), nprocs=2)
    said = {"fails": error_of(fails), "dies": error_of(dies), "refuses": error_of(refuses)}
    seen = []
    lockstep.spawn(lambda: seen.append(lockstep.world_size()), nprocs=1)
    open("here.json", "w").write(json.dumps(seen))
    json.dump(said, open("said.json", "w"))
"""


def run_script(folder: Path, text: str, *arguments: str, fresh: bool = True) -> Ended:
    (folder / "script.py").write_text(text)
    if not fresh:
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "script", *arguments]
        fork = Forked(command, cwd=folder, env=environment(), stdout=pipe, stderr=pipe, text=True)
        return finish(fork, folder)
    ended = subprocess.run(
        [sys.executable, "script.py", *arguments],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr, folder)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("spawn")
    ended = run_script(folder, _SCRIPT, fresh=False)
    assert ended.code == 0, ended.err
    return ended


def test_ranks_of_a_script_know_their_place(said: Ended) -> None:
    ranks = [json.loads((said.folder / f"one/{rank}").read_text()) for rank in (0, 1)]
    assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1"]
    assert {rank["WORLD_SIZE"] for rank in ranks} == {"2"}


def test_trap_32_spawned_ranks_share_one_port(said: Ended) -> None:
    """The parent holds the port; a rank that picks its own is alone there."""
    ports = {
        json.loads((said.folder / f"one/{rank}").read_text())["MASTER_PORT"] for rank in (0, 1)
    }
    assert len(ports) == 1
    assert ports != {"29500"}


def test_the_first_error_is_raised_once(said: Ended) -> None:
    told = json.loads((said.folder / "said.json").read_text())
    kind, text, _ = told["fails"]
    assert kind == "RunError"
    assert text.startswith("rank 1 of 2 failed: ValueError: the loss is not a number")
    assert "script.py:11" in text
    assert told["dies"][1].startswith("rank 1 of 2 failed: the program left with code 3")
    assert told["refuses"][:2] == [
        "UsageError",
        "bad mesh\n  where: script.py:20\n  do: a better one",
    ]
    assert all(seconds < 250 for _, _, seconds in told.values()), (
        "peers, which would sleep for ten minutes, are not waited for"
    )
    assert said.err.count("Traceback") == 2, (
        "of the errors that are not messages to the user, one each"
    )


def test_one_rank_runs_here(said: Ended) -> None:
    assert json.loads((said.folder / "here.json").read_text()) == [1]


def test_a_script_without_a_guard_is_told_to_have_one(tmp_path: Path) -> None:
    """A fresh process imports the script, which would start ranks again."""
    ended = run_script(
        tmp_path, "import lockstep\ndef f(): pass\nlockstep.spawn(f, nprocs=2)\n", fresh=False
    )
    assert ended.code == 1
    assert "put the call below `if __name__ == '__main__':`" in ended.err
    assert ended.err.count("Traceback") == 1


_NOTEBOOK = """
import torch
torch.randn(400, 400) @ torch.randn(400, 400)      # OpenMP's threads are up
import lockstep
def train():
    lockstep.setup()
    torch.randn(400, 400) @ torch.randn(400, 400)
    if lockstep.is_main_process():
        print("sum", lockstep.all_reduce(1, "sum"), flush=True)
    else:
        lockstep.all_reduce(1, "sum")
    lockstep.cleanup()
lockstep.spawn(train, nprocs=2)
"""


def test_from_a_notebook(tmp_path: Path) -> None:
    """The function lives in no file, so ranks are forks; torch's threads don't survive that."""
    ended = subprocess.run(
        [sys.executable, "-"],
        input=_NOTEBOOK,
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "sum 2\n"


_TWO_MACHINES = """
import os, sys
import lockstep

def train(folder):
    names = ("LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_PORT")
    open(f"{folder}/{os.environ['RANK']}", "w").write(" ".join(os.environ[name] for name in names))

if __name__ == "__main__":
    lockstep.spawn(train, (".",), nprocs=2, nnodes=2, node_rank=int(sys.argv[1]), master_addr="h", master_port=7)
"""


def test_trap_30_a_spawned_rank_is_no_machine_number(tmp_path: Path) -> None:
    """mp.spawn's index taken for the rank: two machines are two conflicting worlds. rank = node ·
    nprocs + index.
    """
    (tmp_path / "script.py").write_text(_TWO_MACHINES)
    machines = [
        subprocess.Popen([sys.executable, "script.py", str(node)], cwd=tmp_path, env=environment())
        for node in (0, 1)
    ]
    assert [machine.wait(300) for machine in machines] == [0, 0]
    assert [(tmp_path / str(rank)).read_text() for rank in range(4)] == [
        "0 4 0 7",
        "1 4 0 7",
        "0 4 1 7",
        "1 4 1 7",
    ]


def test_numbers_that_do_not_fit_are_refused() -> None:
    for wrong in ({"nprocs": 0}, {"nprocs": 2, "nnodes": 2, "node_rank": 2, "master_addr": "h"}):
        with pytest.raises(UsageError):
            spawn(print, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="master_addr"):
        spawn(print, nprocs=2, nnodes=2)


def nothing(*_arguments: object) -> None:
    raise AssertionError("not called")


@pytest.mark.parametrize(
    ("call", "message", "fix"),
    [
        (lambda: spawn(nothing, 10), "not the number 10", r"lockstep.spawn\(nothing, nprocs=10\)"),  # type: ignore[arg-type]
        (lambda: spawn(nothing, "config.yaml", 2), "a tuple, not a str", r"args=\(value,\)"),
        (lambda: spawn(nothing, (), "2"), "nprocs is the number of ranks", "nprocs=2"),  # type: ignore[arg-type]
        (lambda: spawn(10, nothing), "10 is not a function", "the function itself"),  # type: ignore[arg-type]
    ],
)
def test_arguments_in_the_wrong_places_are_an_error_with_the_call(
    call: Callable[[], None], message: str, fix: str
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        call()
    assert re.search(fix, str(raised.value))


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "4"},
        {"RANK": "1", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0"},
    ],
)
def test_trap_30_variables_of_another_world_are_refused(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    """`WORLD_SIZE=4 RANK=0 python train.py` on each of two machines: two worlds of two ranks,
    without a word.
    """
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="but spawn would start ranks 0 to 1 of 2"):
        spawn(nothing, nprocs=2)


@pytest.mark.parametrize("rank", ["1", "2"])
def test_variables_of_the_same_world_are_right(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    """RANK as the machine's number of as many machines, or as this machine's first rank of as many
    ranks.
    """
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", {"1": "2", "2": "4"}[rank])
    _check_environment(nprocs=2, nnodes=2, node_rank=1)
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(UsageError, match="WORLD_SIZE is not"):
        spawn(nothing, nprocs=2)


_AGAIN = """
import gc, json, os, signal, subprocess, sys, time
import torch
import lockstep
from lockstep.prepared import fork_server
from lockstep.launch.spawn import spawn_again

def look(number):
    import torch
    lockstep.setup()
    with open(f"{number}-{os.environ['RANK']}.json", "w") as file:
        json.dump({"parent": os.getppid(), "variable": os.environ.get("NEW"), "threads": torch.get_num_threads(),
                   "world": torch.distributed.get_world_size(), "frozen": gc.get_freeze_count(),
                   "also": "colorsys" in sys.modules}, file)

def fails():
    raise lockstep.UsageError("bad mesh", fix="a better one")

def sleeps():
    open(f"pid-{os.environ['RANK']}", "w").write(str(os.getpid()))
    time.sleep(600)

def main():
    import script
    if "prepared" in sys.argv:
        fork_server.split_off(also=["colorsys", "no_such_module"])
    json.dump(os.getpid(), open("caller.json", "w"))
    if "killed" in sys.argv:
        spawn_again(script.sleeps, (), 2, preload=[])
    for number in (2, 3):
        os.environ["NEW"] = str(number)
        spawn_again(script.look, (number,), number, preload=["lockstep.trainer"])
    try:
        spawn_again(script.fails, (), 2, preload=[])
    except lockstep.UsageError as error:
        print(str(error).splitlines()[0])
    return 0

if __name__ == "__main__":
    sys.exit(fork_server.run(main))
"""


SERVERS = [pytest.param("of multiprocessing", marks=pytest.mark.full), "prepared"]


@pytest.mark.full
@pytest.mark.parametrize("server", SERVERS)
def test_ranks_that_are_started_again_are_forks_of_one_server(server: str, tmp_path: Path) -> None:
    """With the variables of now, and a world of their own each time; the first error is raised
    once. A command's prepared process makes its ranks children of the command.
    """
    ended = run_script(tmp_path, _AGAIN, server)
    assert ended.code == 0, ended.err
    assert ended.out.splitlines()[-1] == "bad mesh"
    seen = [
        json.loads((tmp_path / f"{number}-{rank}.json").read_text())
        for number in (2, 3)
        for rank in range(number)
    ]
    assert len({one["parent"] for one in seen}) == 1, "one server"
    caller = json.loads((tmp_path / "caller.json").read_text())
    assert (seen[0]["parent"] == caller) == (server == "prepared")
    assert [(one["variable"], one["world"]) for one in seen] == [("2", 2)] * 2 + [("3", 3)] * 3
    assert {one["threads"] for one in seen} == {1}
    assert {one["also"] for one in seen} == {server == "prepared"}
    assert all(one["frozen"] > 10_000 for one in seen), "no collection looks at what was imported"


_FORKS = """
from lockstep.launch.spawn import spawn_again

def rank():
    pass

if __name__ == "__main__":
    import script
    spawn_again(script.rank, (), 2, preload=["torch"])
"""


@pytest.mark.parametrize("threads", quick_and_full(["", "2,1", "many"], []))
def test_a_number_of_threads_that_is_none_is_no_reason_to_stop(
    tmp_path: Path, threads: str
) -> None:
    """OpenMP warns of it, and takes its own default; its lists, as 2,1, are numbers for nested
    regions.
    """
    (tmp_path / "script.py").write_text(_FORKS)
    ended = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(OMP_NUM_THREADS=threads),
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("server", SERVERS)
def test_they_end_with_the_process_that_started_them(server: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_AGAIN)
    process = subprocess.Popen(
        [sys.executable, "script.py", "killed", server], cwd=tmp_path, env=environment()
    )
    files = [tmp_path / f"pid-{rank}" for rank in range(2)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    process.kill()
    process.wait()
    wait_for(lambda: not any(is_running(int(file.read_text())) for file in files))
