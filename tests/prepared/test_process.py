"""Ranks are forks of one process that has imported torch and Lockstep, else as fresh ones."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from lockstep.prepared import fork_server
from lockstep.prepared import process as prepared
from lockstep.prepared.process import ForkRequest, PreparedProcess
from lockstep.prepared.rank_starts import rank_starter, reason_of_script, sets_variables
from tests import forked
from tests.forked import Forked
from tests.launch.shared import REPOSITORY, environment, start

# What a process finds at its first instruction.
FACTS = """
import sys
is_fork = "torch" in sys.modules
import json, os, random, signal
me = os.environ["RANK"]
facts = {
    "argv": sys.argv, "folder": os.getcwd(), "path": sys.path, "flags": str(sys.flags),
    "stdin": os.fstat(0).st_rdev, "isatty": [s.isatty() for s in (sys.stdin, sys.stdout)],
    "encoding": [sys.stdout.encoding, sys.stderr.encoding, sys.stderr.errors],
    "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    "handlers": {
        s.name: getattr(signal.getsignal(s), "__qualname__", str(signal.getsignal(s)))
        for s in signal.Signals if s.value < 32
    },
    "session": os.getsid(0) == os.getpid(), "mask": os.umask(0o022),
    "descriptors": len(os.listdir("/proc/self/fd")),
    **{
        k: v for k, v in os.environ.items()
        if not k.startswith(("TORCHELASTIC", "MASTER", "LOCKSTEP_HEARTBEATS"))
    },
    "main": [__name__, __file__],
}
import ctypes, numpy, torch
lines = open("/proc/self/maps").read().splitlines()
blas = ctypes.CDLL(next(line.split()[-1] for line in lines if "openblas64_" in line))
prefix = "scipy_" if "libscipy_" in blas._name else ""  # NumPy's library before its version 2
blas_threads = getattr(blas, prefix + "openblas_get_num_threads64_")
own = {
    "torch": torch.initial_seed(), "numpy": int(numpy.random.randint(2**62)),
    "python": random.getrandbits(62), "threads": torch.get_num_threads(),
    "blas": blas_threads(),
}
open(f"facts-{me}.json", "w").write(json.dumps({"is_fork": is_fork, "facts": facts, "own": own}))
"""


def launched(folder: Path, script: str, *options: str, fresh: bool = False) -> Any:
    """Launch a script on two ranks; return the process when it has ended, and its output."""
    (folder / "script.py").write_text(script)
    process = start(
        folder, "launch", "--nproc-per-node", "2", *options, "script.py", "word", fresh=fresh
    )
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def found(folder: Path, rank: int) -> dict[str, Any]:
    said: dict[str, Any] = json.loads((folder / f"facts-{rank}.json").read_text())
    return said


@pytest.fixture
def ignored_signals() -> Iterator[None]:
    """What is started is so as by nohup, and as by a shell without job control with `&`."""
    before = {n: signal.getsignal(n) for n in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR2)}
    for number in before:
        signal.signal(number, signal.SIG_IGN)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("ignored_signals")
def test_a_fork_finds_what_a_fresh_process_finds(tmp_path: Path) -> None:
    sides = {}
    for name, option in (("fork", ()), ("fresh", ("--fresh-processes",))):
        code, _, err = launched(tmp_path, FACTS, *option, fresh=True)
        assert (code, err) == (0, "")
        sides[name] = [found(tmp_path, rank) for rank in (0, 1)]
    assert [side["is_fork"] for side in sides["fork"]] == [True, True]
    assert [side["is_fork"] for side in sides["fresh"]] == [False, False]
    for fork, fresh in zip(sides["fork"], sides["fresh"], strict=True):
        differing = {
            name: (fork["facts"][name], fresh["facts"][name])
            for name in fork["facts"]
            if fork["facts"][name] != fresh["facts"][name]
        }
        assert not differing
        for threads in ("threads", "blas"):
            assert fork["own"][threads] == fresh["own"][threads]
    first, second = (side["own"] for side in sides["fork"])
    for generator in ("torch", "numpy", "python"):
        assert first[generator] != second[generator], f"{generator} begins alike on two ranks"


def test_a_restart_forks_again_and_starts_afresh_where_it_can_not(tmp_path: Path) -> None:
    """A cold launcher; its prepared process is killed between the second and the third start."""
    script = """
import sys
is_fork = "torch" in sys.modules
import os, signal, pathlib
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
me = os.environ["RANK"]
pathlib.Path(f"start-{attempt}-{me}").write_text(str(is_fork))
if me == "1" and attempt < 2:
    if attempt == 1:
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                words = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\\0")
                facts = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if b"lockstep" in words and facts[1] == str(os.getppid()):
                found[int(facts[19])] = int(pid)  # by its start: ranks are its forks
        server = found[min(found)]
        os.kill(server, signal.SIGKILL)
    raise ValueError(f"the attempt {'AB'[attempt]} fails")
"""
    code, _, err = launched(tmp_path, script, "--max-restarts", "2", fresh=True)
    starts = {path.name: path.read_text() for path in tmp_path.glob("start-*")}
    assert code == 0, err
    assert starts["start-0-0"] == starts["start-1-1"] == "True"
    assert starts["start-2-0"] == starts["start-2-1"] == "False"
    assert "ranks are started as fresh processes: the prepared process" in err


def test_forks_are_ready_before_a_restart_and_end_with_the_launcher(tmp_path: Path) -> None:
    script = """
import json, os, pathlib, psutil, time
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
me = os.environ["RANK"]
launcher = psutil.Process(os.getppid())
children = []
while len(children) < 5:  # two ranks, the prepared process, two forks
    time.sleep(0.05)
    children = [child for child in launcher.children() if child.status() != "zombie"]
facts = {"me": os.getpid(), "children": [child.pid for child in children]}
pathlib.Path(f"start-{attempt}-{me}").write_text(json.dumps(facts))
while len(list(pathlib.Path().glob(f"start-{attempt}-*"))) < 2:
    time.sleep(0.05)
if attempt == "0":
    raise ValueError("the first attempt fails")
"""
    code, _, err = launched(tmp_path, script, "--max-restarts", "1", fresh=True)
    assert code == 0, err
    before, after = (
        [json.loads((tmp_path / f"start-{attempt}-{rank}").read_text()) for rank in (0, 1)]
        for attempt in (0, 1)
    )
    assert {rank["me"] for rank in after} < set(before[0]["children"])
    _until(lambda: not any(_runs(pid) for pid in after[0]["children"]))


def test_forks_that_are_ready_end_with_the_ranks_of_a_program_that_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a notebook, whose own prepared process stays when its ranks have ended."""
    own = forked.prepared_process()
    monkeypatch.setattr(prepared, "_own", [own])
    here = psutil.Process()
    before = {child.pid for child in here.children()}

    def ready() -> set[int]:
        """Forks of this process that run; the one that was asked for ends at once."""
        return {
            child.pid
            for child in here.children()
            if child.pid not in before and child.status() != psutil.STATUS_ZOMBIE
        }

    with rank_starter(None, print, restarts=True) as starter:
        command = [sys.executable, "-m", "keyword"]
        assert starter(command, dict(os.environ), None, None).wait() == 0
        _until(lambda: len(ready()) == 1)
    _until(lambda: not ready())


def test_a_fork_whose_parent_is_gone_ends() -> None:
    """Who asked is killed before the fork is its child."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    read, write = os.pipe()
    fork = os.fork()
    if fork == 0:
        os.close(read)
        fork_server.become(ForkRequest("none", [], {}, ".", parent=gone.pid), [])
        os._exit(0)
    os.close(write)
    ended = bool(select.select([read], [], [], 60)[0])
    os.close(read)
    os.kill(fork, signal.SIGKILL)
    assert ended, "it waits for ever"
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 1


def test_a_fork_can_be_ended_with_its_group_at_once() -> None:
    """A rank that fails as it starts ends the others: one that had no group yet was not found, and
    kept the launcher for 30 s, or made it fail.
    """
    request = ForkRequest("json.tool", [], dict(os.environ), ".", os.getpid())
    for _ in range(20):
        pid = forked.prepared_process().fork(request, (0, 1, 2))
        os.killpg(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_what_makes_a_fork_unsafe_is_found() -> None:
    """In a process of its own: a thread, an open device, drawn numbers.

    The threads of a library that ends them for a fork, such as numpy's, do no harm.
    """
    program = """
import threading
from lockstep.prepared import fork_server
import numpy, torch
say = lambda: print(fork_server.why_not_fork())
numpy.ones((500, 500)) @ numpy.ones((500, 500))
print(fork_server._threads() > 1)
say()
ends = threading.Event()
thread = threading.Thread(target=ends.wait)
thread.start()
say()
ends.set()
thread.join()
say()
file = open("/dev/zero")
say()
fork_server._DEVICES = ("/dev/zero",)
say()
file.close()
torch.rand(1)
say()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env=environment(OPENBLAS_NUM_THREADS="2"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.splitlines() == [
        "True",
        "None",
        "what was imported has started 1 thread",
        "None",
        "None",
        "what was imported has opened /dev/zero",
        "what was imported has drawn random numbers",
    ]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({}, None),
        ({"OMP_NUM_THREADS": "3", "PYTHONUNBUFFERED": "1"}, None),
        ({"PYTHONPATH": "plain"}, None),
        ({"PYTHONPATH": "own"}, "Python runs {own}/sitecustomize.py when a process starts"),
        ({"PYTHONOPTIMIZE": "1"}, "PYTHONOPTIMIZE is read when a process starts"),
        ({"LD_PRELOAD": "libjemalloc.so"}, "LD_PRELOAD is read when a process starts"),
    ],
)
def test_what_is_read_when_a_process_starts_makes_no_fork(
    more: dict[str, str], says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("own", "plain"):
        (tmp_path / name).mkdir()
    (tmp_path / "own" / "sitecustomize.py").touch()
    monkeypatch.chdir(tmp_path)
    mine, its = socket.socketpair()
    prepared = PreparedProcess(mine, 0, {"HOME": "/"})
    with mine, its:
        why = None if says is None else says.format(own=tmp_path / "own")
        assert prepared.why_not({"HOME": "/", **more}) == why


@pytest.mark.parametrize(
    ("line", "sets"),
    [
        ('os.environ["OMP_NUM_THREADS"] = "1"', True),
        ('os.environ.setdefault("A", "1")', True),
        ('environ.update(A="1")', True),
        ('os.putenv("A", "1")', True),
        ('del os.environ["A"]', True),
        ('os.environ |= {"A": "1"}', True),
        ('print(os.environ["A"], os.environ.get("B"))', False),
        ('settings["environ"] = 3', False),
        ("a b", False),
    ],
)
def test_a_script_that_sets_variables_gets_fresh_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, sets: bool
) -> None:
    assert sets_variables(line) == sets
    (tmp_path / "package").mkdir()
    for name in ("script.py", "package/module.py"):
        (tmp_path / name).write_text(line)
    monkeypatch.chdir(tmp_path)
    reasons = [
        reason_of_script("script.py", "file"),
        reason_of_script("package.module", "module"),
        reason_of_script("no.such", "module"),
    ]
    assert [reason is not None for reason in reasons] == [sets, sets, False]
    assert reason_of_script("/bin/true", "program") == ""


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("sys.exit()", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('words')", 1),
        ("raise ValueError('wrong')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("pass", 0),
    ],
)
def test_a_fork_ends_as_a_fresh_process_does(tmp_path: Path, line: str, code: int) -> None:
    """With what it has still to write, after its threads and what is registered for its end."""
    (tmp_path / "ends.py").write_text(f"""
import atexit, os, sys, threading, time
def late():
    time.sleep(0.3)
    print("thread")
atexit.register(lambda: print("at exit"))
threading.Thread(target=late).start()
print("begins")
sys.stdout.flush()
{line}
""")
    outs = []
    for kind in (Forked, subprocess.Popen):
        process = kind(
            [sys.executable, "-m", "ends"],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        out, err = process.communicate(timeout=100)
        outs.append((process.returncode, out.splitlines(), err.splitlines()[-1:]))
    assert outs[0] == outs[1]
    assert outs[0][0] == code


@pytest.mark.full
def test_it_is_said_why_ranks_are_fresh(tmp_path: Path) -> None:
    script = 'import os\nos.environ["SOME"] = "1"\n' + FACTS
    code, _, err = launched(tmp_path, script)
    assert code == 0
    expected = (
        "lockstep: ranks are started as fresh processes: script.py sets environment variables"
    )
    assert err.splitlines() == [expected]
    assert not found(tmp_path, 0)["is_fork"]


@pytest.mark.full
def test_a_module_that_was_edited_is_another_one_after_a_restart(tmp_path: Path) -> None:
    """Ranks import what is the user's themselves, each time; rank 1 edits it and fails."""
    (tmp_path / "own.py").write_text("VALUE = 'before'\n")
    script = """
import os, pathlib
import torch
import own
attempt, me = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
pathlib.Path(f"saw-{attempt}-{me}").write_text(own.VALUE)
if attempt == "0" and me == "1":
    while not pathlib.Path("saw-0-0").exists():
        pass
    pathlib.Path("own.py").write_text("VALUE = 'after it was edited'\\n")
    raise ValueError("the module must be edited")
"""
    code, _, err = launched(tmp_path, script, "--max-restarts", "1", fresh=True)
    assert code == 0, err
    seen = {path.name: path.read_text() for path in tmp_path.glob("saw-*")}
    after = "after it was edited"
    assert seen == {"saw-0-0": "before", "saw-0-1": "before", "saw-1-0": after, "saw-1-1": after}


@pytest.mark.full
def test_a_thread_of_what_python_runs_first_makes_ranks_fresh(tmp_path: Path) -> None:
    """A launcher that has a thread can't be forked safely: one line says so, and all goes on."""
    own = tmp_path / "site"
    own.mkdir()
    (own / "sitecustomize.py").write_text(
        "import threading\n"
        "ends = threading.Event()\n"
        "threading.Thread(target=ends.wait, daemon=True).start()\n"
    )
    (tmp_path / "script.py").write_text(FACTS)
    process = start(
        tmp_path,
        "launch",
        "--nproc-per-node",
        "2",
        "script.py",
        fresh=True,
        PYTHONPATH=os.pathsep.join([str(own), environment()["PYTHONPATH"]]),
    )
    _, err = process.communicate(timeout=200)
    line = "lockstep: ranks are started as fresh processes: what was imported has started 1 thread"
    assert (process.returncode, err.splitlines()) == (0, [line])
    assert not any(found(tmp_path, rank)["is_fork"] for rank in (0, 1))


def test_nothing_is_left_of_a_prepared_process(tmp_path: Path) -> None:
    """It ends with its launcher, also when that one is killed."""
    (tmp_path / "script.py").write_text(
        "import os, time, pathlib\n"
        "pathlib.Path('up-' + os.environ['RANK']).touch()\n"
        "time.sleep(100)\n"
    )
    process = start(tmp_path, "launch", "--nproc-per-node", "2", "script.py", fresh=True)
    try:
        _until(lambda: len(list(tmp_path.glob("up-*"))) == 2)
        ours = _children(process.pid)
        assert len(ours) == 3  # two ranks, and what they are forks of
        assert {os.getsid(pid) for pid in ours} == ours
    finally:
        process.kill()
        process.communicate()
    _until(lambda: not any(map(_runs, ours)))


def _runs(pid: int) -> bool:
    """Return whether a process has not ended; its parent may not have asked yet how it did."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def _children(pid: int) -> set[int]:
    return {int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
