"""Commands in forks of the process that `lockstep warm` leaves."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.prepared import warm
from tests.launch.shared import environment

SAYS = """
import sys
is_fork = "torch" in sys.modules
import os, pathlib
pathlib.Path("said-" + os.environ.get("RANK", "")).write_text(f"{is_fork} {os.getpid()}")
"""


def command(*words: str, **more: str) -> subprocess.Popen[str]:
    """Start `lockstep WORDS` as a fresh process, which may use the warm one."""
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep", *words],
        env=known_variables(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def known_variables(**more: str) -> dict[str, str]:
    """Return this process's variables, without those of its test."""
    known = environment(**more)
    known.pop("PYTEST_CURRENT_TEST", None)
    return known


def ended(*words: str, **more: str) -> tuple[int, str, str]:
    """Return the exit code of a command and what it wrote."""
    process = command(*words, **more)
    out, err = process.communicate(timeout=200)
    return process.returncode, out, err


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def runs(pid: int) -> bool:
    """Whether a process is there that has not ended; nobody may have waited for it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module", autouse=True)
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder for sockets of these tests alone; what listens there is stopped in the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        yield
        while (status := warm.status()) is not None:
            warm.stop()
            until(lambda pid=status.pid: not runs(pid))  # type: ignore[misc]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The process that `lockstep warm` left; it is started where there is none."""
    monkeypatch.chdir(tmp_path)
    if warm.status() is None:
        code, out, err = ended("warm")
        assert (code, err) == (0, "")
        assert "starts commands in a fork; used 0 times" in out
    status = warm.status()
    assert status is not None
    return status.pid


def launch(script: str, *options: str, **more: str) -> subprocess.Popen[str]:
    Path("script.py").write_text(script)
    return command("launch", "--nproc-per-node", "2", *options, "script.py", **more)


def test_ranks_are_forks_and_the_command_loads_no_torch(server: int) -> None:
    Path("script.py").write_text(SAYS)
    program = (
        "import sys; from lockstep.__main__ import run;"
        "sys.argv[1:] = ['launch', '--nproc-per-node', '2', 'script.py']; code = run();"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=known_variables(), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("lockstep: script.py: 2 processes")
    for rank in (0, 1):
        assert Path(f"said-{rank}").read_text().startswith("True ")


def test_one_process_is_a_fork_too(server: int) -> None:
    Path("script.py").write_text(SAYS)
    assert ended("launch", "script.py")[0] == 0
    assert Path("said-0").read_text().startswith("True ")


@pytest.mark.parametrize(
    "words",
    [
        (),
        *(
            pytest.param(words, marks=pytest.mark.full)
            for words in (("-m",), ("--fresh-processes",), ("--watch-training",))
        ),
    ],
)
def test_what_must_be_fresh_is_fresh_in_one_process_too(
    server: int, words: tuple[str, ...]
) -> None:
    """A script that sets variables, which torch may read while it is imported; and what asks."""
    sets = 'os.environ["SOME_LIBRARY"] = "1"' if words in ((), ("-m",)) else ""
    Path("script.py").write_text(SAYS + sets)
    before = warm.status()
    ended("launch", *words, "script" if words == ("-m",) else "script.py")
    after = warm.status()
    assert before is not None
    assert after is not None
    assert after.commands == before.commands


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("raise ValueError('no such thing')", 1, "no such thing"),
        ("import lockstep; raise lockstep.UsageError('wrong')", 2, "wrong"),
        ("import sys; sys.exit(0)", 0, ""),
    ],
)
def test_it_ends_as_the_command_does(server: int, script: str, code: int, said: str) -> None:
    process = launch(script)
    _, err = process.communicate(timeout=200)
    assert process.returncode == code
    assert said in err
    assert bool(err) == bool(code)


WAITS = (
    SAYS
    + """
import signal, time
def save(*_):
    pathlib.Path("saved-" + os.environ["RANK"]).touch()
    sys.exit()
signal.signal(signal.SIGTERM, save)
pathlib.Path("up-" + os.environ["RANK"]).touch()
while True:
    time.sleep(0.05)
"""
)


def ranks_are_up() -> bool:
    return len(list(Path().glob("up-*"))) == 2


def test_signals_reach_the_command(server: int) -> None:
    process = launch(WAITS)
    until(ranks_are_up)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)
    assert process.returncode == 75
    assert sorted(path.name for path in Path().glob("saved-*")) == ["saved-0", "saved-1"]


@pytest.mark.promise("whoever asked is gone, its command is killed")
@pytest.mark.parametrize("killed", ["command", pytest.param("server", marks=pytest.mark.full)])
def test_nothing_outlives_the_command_or_the_server(server: int, killed: str) -> None:
    process = launch(WAITS)
    until(ranks_are_up)
    ranks = [int(path.read_text().split()[1]) for path in Path().glob("said-*")]
    os.kill(process.pid if killed == "command" else server, signal.SIGKILL)
    _, err = process.communicate(timeout=100)
    until(lambda: not any(map(runs, ranks)))
    if killed == "server":
        assert process.returncode == 1
        assert err.startswith("lockstep: the prepared process has ended, and with it this command")
        assert launch(SAYS).wait(100) == 0  # as if there were none


@pytest.mark.promise(
    "It runs nothing for a command whose variables, limits or packages differ from its own."
)
@pytest.mark.full
def test_other_surroundings_are_refused_and_prepared_anew(server: int) -> None:
    process = launch(SAYS, SOME_LIBRARY="1")
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0
    expected = "is not used, since this command has another variable SOME_LIBRARY; a new one"
    assert expected in err
    until(lambda: warm.status() is not None)
    status = warm.status()
    assert status is not None
    assert status.pid != server
    process = launch(SAYS, SOME_LIBRARY="1")
    _, err = process.communicate(timeout=200)
    assert (process.returncode, err) == (0, "")
    assert Path("said-0").read_text().startswith("True ")
    warm.stop()  # it has that variable


def test_surroundings_are_all_that_a_fork_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program that reads them, started in another way each time."""
    program = (
        "import json; from lockstep.prepared import warm; print(json.dumps(warm.surroundings()))"
    )

    def found(*before: str, python: tuple[str, ...] = (), **more: str) -> dict[str, str]:
        import json

        line = [*before, sys.executable, *python, "-c", program]
        out = subprocess.run(
            line, env=known_variables(**more), capture_output=True, check=True
        ).stdout
        values: dict[str, str] = json.loads(out)
        return values

    def differing(other: dict[str, str]) -> set[str]:
        return {name for name in usual.keys() | other.keys() if usual.get(name) != other.get(name)}

    usual = found()
    assert differing(found(TERM="other", SSH_TTY="/dev/pts/9")) == set()
    assert differing(found(OMP_NUM_THREADS="3")) == {"variable OMP_NUM_THREADS"}
    assert differing(found("nice", "-n", "1")) == {"priority"}
    assert differing(found("taskset", "-c", "0")) == {"processors"}
    assert differing(found("sh", "-c", 'ulimit -n 900; exec "$@"', "sh")) == {
        "limit RLIMIT_NOFILE",
        "limit RLIMIT_OFILE",
    }
    assert differing(found(python=("-O",))) == {"Python"}


@pytest.mark.full
def test_it_ends_when_it_is_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder's name is longer than an address of a socket may be."""
    tmp_path = tmp_path / ("long" * 30)
    tmp_path.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert ended("warm", "--idle-minutes", "0.2")[0] == 0
    until(lambda: warm.status() is None)
    assert not list(tmp_path.glob("*/*.sock"))
    assert ended("warm", "--status")[1] == "there is none: lockstep warm\n"
    assert ended("warm", "--stop")[1] == "there is none\n"
    code, _, err = ended("warm", "--idle-minutes", "0")
    assert code == 2
    assert "--idle-minutes 0 is not above 0" in err


@pytest.mark.promise(
    "Its socket lies in a folder that only you may enter; another kind of folder is refused."
)
def test_a_folder_that_others_can_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / f"lockstep-warm-{os.getuid()}"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    code, _, err = ended("warm")
    assert code == 2
    assert "is not a folder of yours alone" in err
    monkeypatch.chdir(tmp_path)
    assert launch(SAYS).wait(100) == 0  # as if there were none
    folder.rmdir()
    folder.symlink_to("/tmp")
    assert ended("warm", "--status")[0] == 2


@pytest.mark.full
def test_doctor_shows_it(server: int) -> None:
    _, out, _ = ended("doctor")
    assert f"✓ warm process     process {server} starts commands in a fork" in out
