"""One run at a time in a run directory, with processes that hold it, are killed, or seem to be on
other machines.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.checkpoint.posix import draft_name, writer_has_ended
from lockstep.cli import main
from lockstep.errors import RunError, UsageError
from lockstep.run_directory import run_lock
from lockstep.run_directory.run_lock import FILE, LAUNCH, Holder, RunLock, require_free
from tests.faults.tiny import Points, events, trainer
from tests.launch.shared import environment, wait_for

_HOLD = """
import os, sys, time
from pathlib import Path
from lockstep.run_directory import run_lock
from lockstep.run_directory.run_lock import Holder, RunLock
machine, beat = sys.argv[2:4]
run_lock.BEAT_SECONDS = float(beat)
if machine:
    me = Holder(**{**vars(Holder.this_process()), "machine": machine})
    Holder.this_process = classmethod(lambda cls: me)
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
child = os.fork()
if child == 0:
    os.closerange(0, 3)
    time.sleep(60)  # a data worker that outlives its parent
    os._exit(0)
print(child, flush=True)
sys.stdin.readline()
while machine:  # the next beat finds that another run has taken over
    lock.check()
    time.sleep(0.05)
lock.check()
lock.release()
"""


def never_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not get the lock at once, looks again after a sleep: here that is an error."""

    def sleep(_seconds: float) -> None:
        raise AssertionError("the lock is not there at once")

    clock = SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=sleep)
    monkeypatch.setattr(run_lock, "time", clock)


Hold = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def hold(tmp_path: Path) -> Iterator[Hold]:
    """Start a process that has the lock of `tmp_path`, and seems to be on another machine where one
    is named.
    """
    children: list[int] = []

    def start(machine: str = "", beat: float = 0.1) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(tmp_path), machine, str(beat)],
            env=environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        children.append(process.pid)
        children.append(int(process.stdout.readline()))
        return process

    yield start
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (
        ("PATIENCE", 1.0),
        ("_DYING", 0.5),
        ("_LOOK", 0.05),
        ("BEAT_SECONDS", 0.1),
    ):
        monkeypatch.setattr(run_lock, name, seconds)


@pytest.mark.fault(
    "process: a second run in the same run directory",
    "the same command is started twice; or a requeued job meets the one before it",
    "the second is refused before it trains, with exit code 2 and the host, process and time of the"
    " first",
)
@pytest.mark.fault(
    "process: a run is killed and started again in its directory",
    "SIGKILL to the process that holds the directory's lock, while a child of it lives on",
    "the next run has the lock at once: the kernel gives it up, and children do not inherit it",
)
def test_a_second_run_is_refused_and_a_killed_one_blocks_nobody(
    tmp_path: Path,
    hold: Hold,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = hold()
    with pytest.raises(UsageError, match=rf"process {first.pid} on \S+, since 20") as caught:
        RunLock(tmp_path).acquire()
    assert "--output-dir" in str(caught.value)
    with pytest.raises(UsageError, match="another run is writing to"):
        require_free(tmp_path)
    (tmp_path / "tiny.yaml").write_text("model: {name: bdh}\ndata: {name: python-docs}\n")
    code = main(
        [
            "train",
            str(tmp_path / "tiny.yaml"),
            "--nproc-per-node",
            "1",
            "--output-dir",
            str(tmp_path),
        ]
    )
    said = capfd.readouterr().err
    assert (code, said.count("lockstep: another run is writing to")) == (2, 1), said
    assert str(first.pid) in said
    assert "Traceback" not in said
    with pytest.raises(UsageError, match="another run is writing to"):
        trainer(tmp_path).train(Points())
    assert not events(tmp_path, "start")
    first.kill()
    first.wait()
    never_sleep(monkeypatch)
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.acquire()  # it has it
    lock.release()
    assert json.loads((tmp_path / FILE).read_text()) == {}


def test_a_trainer_gives_the_directory_up_and_takes_it_again(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.resume("auto")
    assert "another run is writing to" in _in_another_process(tmp_path)
    run.train(Points())
    assert not _in_another_process(tmp_path)
    again = trainer(tmp_path)
    again.resume(str(tmp_path / "checkpoints/step-00000006"))
    again.train(Points())


def _in_another_process(folder: Path) -> str:
    """What a launcher says that would start a run in `folder`."""
    text = (
        "import sys; from pathlib import Path\n"
        "from lockstep.run_directory.run_lock import require_free\n"
    )
    return subprocess.run(
        [sys.executable, "-c", text + "require_free(Path(sys.argv[1]))", str(folder)],
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
    ).stderr


@pytest.mark.fault(
    "process: a run is started again on another machine",
    "the first one's machine is gone; its file server may still keep its lock",
    "the new run looks for signs of life for 15 s, and takes over; a first run that comes back ends"
    " with one message",
)
def test_a_run_on_another_machine_is_known_by_its_beats(
    tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "PATIENCE", 3.0)  # thirty beats of the other, on a busy machine
    alive = hold("another-boot")
    said: list[str] = []
    with pytest.raises(UsageError, match=rf"process {alive.pid}"):
        RunLock(tmp_path, said.append).acquire()
    assert len(said) == 1
    assert "looking for up to 3 s" in said[0]
    alive.send_signal(signal.SIGSTOP)  # a machine that is gone for a while
    lock = RunLock(tmp_path)
    begun = time.monotonic()
    lock.acquire()
    assert time.monotonic() - begun > 3.0
    alive.send_signal(signal.SIGCONT)
    _, error = alive.communicate("\n", timeout=200)
    assert "another run has taken over" in error
    lock.check()
    lock.release()
    gone = Holder(
        **{**vars(Holder.this_process()), "machine": "another-boot", "launch": "0123456789abcdef"}
    )
    (tmp_path / FILE).write_text(json.dumps(vars(gone)))
    begun = time.monotonic()
    lock.acquire()
    assert time.monotonic() - begun > 3.0, (
        "it may be alive, on a file system that keeps locks on one machine only"
    )
    lock.release()


def test_an_attempt_of_the_same_launch_takes_over_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 of an elastic run may come back on another machine."""
    monkeypatch.setenv(LAUNCH, "job at host:29500")
    gone = Holder(**{**vars(Holder.this_process()), "machine": "another-boot"})
    (tmp_path / FILE).write_text(json.dumps(vars(gone)))
    lock = RunLock(tmp_path)
    never_sleep(monkeypatch)
    lock.acquire()
    lock.release()


def test_a_file_system_without_locks(
    tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written down decides: whether the process is there, and of two that come at once the
    last to write.
    """
    first = hold()
    monkeypatch.setattr(run_lock, "_lock", lambda _handle: None)
    with pytest.raises(UsageError, match=rf"process {first.pid}"):
        RunLock(tmp_path).acquire()
    first.kill()
    first.wait()
    mine = RunLock(tmp_path)
    mine.acquire()
    mine.release()
    refused = []
    taken = []

    def try_it() -> None:
        lock = RunLock(tmp_path)
        try:
            lock._me = Holder.this_process()
            taken.append(lock._take(lock._me))
        except UsageError as error:
            refused.append(error)

    threads = [threading.Thread(target=try_it) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(taken), len(refused)) == (1, 1)


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100000, '{"pid": Infinity}', "\x00" * 64], ids=range(5)
)
def test_a_damaged_file_blocks_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.release()


def test_a_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="can't be locked"):
        RunLock(tmp_path / "file" / "run").acquire()


def test_a_run_that_was_taken_over_ends(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.resume("auto")
    other = Holder(**{**vars(Holder.this_process()), "machine": "another-boot"})
    (tmp_path / FILE).write_text(json.dumps(vars(other)))
    lock = run.state.output._lock
    assert lock is not None
    wait_for(lambda: lock._lost is not None)
    with pytest.raises(RunError, match="another run has taken over"):
        run.train(Points())


def test_a_killed_process_that_nobody_waits_for_holds_nothing() -> None:
    """Its number stays in use until its parent waits; it is dead all the same."""
    with subprocess.Popen(["sleep", "600"]) as process:
        holder = replace(
            Holder.this_process(), pid=process.pid, started=run_lock._started(process.pid)
        )
        draft = draft_name("step-00000001", pid=process.pid)
        assert holder.is_running
        assert writer_has_ended(draft) is False
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not holder.is_running
        assert writer_has_ended(draft) is True
