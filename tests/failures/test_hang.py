"""Which rank is behind, found from outside: small processes that beat as ranks do, and stop."""

import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.errors import RunError
from lockstep.failures.failure import Failure
from lockstep.failures.hang import HangWatch
from lockstep.heartbeat.files import (
    DUMP,
    HEAD,
    SIZE,
    Call,
    mapped,
    read_call,
    write_call,
    write_end,
)
from lockstep.heartbeat.watcher import read_beats
from lockstep.heartbeat.writer import Heartbeat
from lockstep.launch.rendezvous_handlers import Membership
from lockstep.process_group.rendezvous import StoredDepartures
from tests.launch.shared import environment, wait_for

_RANK = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from lockstep.heartbeat.writer import Heartbeat
from lockstep.failures.stacks import write_on_request
folder, logs, rank, how = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
mine = Heartbeat(folder, rank)
beat = mine.beat
if how == "deaf":
    signal.signal(signal.SIGQUIT, signal.SIG_IGN)
elif how == "in parts":
    def write_in_parts():
        with open(logs / f"rank-{rank}.stacks.txt", "a") as file:
            print("Thread 0x1 (most recent call first):", file=file, flush=True)
            time.sleep(0.5)
            print('  File "train.py", line 7 in wait', file=file, flush=True)
            time.sleep(0.5)
            print('  File "train.py", line 9 in <module>', file=file, flush=True)
    (logs / f"rank-{rank}.stacks.txt").touch()
    signal.signal(signal.SIGQUIT, lambda *_: threading.Thread(target=write_in_parts).start())
else:
    write_on_request(logs / f"rank-{rank}.stacks.txt")
def answer():  # requests for the last collectives, as the thread of torch's recorder does
    while True:
        if (folder / "dump").exists():
            (folder / f"flight-{rank}.json").write_text("{}")
        time.sleep(0.01)
if how in ("a script", "a data worker", "a collective", "a step", "a save"):
    threading.Thread(target=answer, daemon=True).start()
if how == "a script":
    time.sleep(600)
if how == "a data worker":
    worker = os.fork()
    if not worker:
        ctypes.CDLL(None).prctl(15, b"pt_data_worker")  # PR_SET_NAME
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the rank, also if a test fails
        (folder / "new").write_text(str(os.getpid()))
        (folder / "new").rename(folder / f"worker-{rank}")
        signal.pause()
    mine.call("evaluate").__enter__()
if how == "a collective":
    beat(2, "pause")
    sys.path.insert(0, str(logs / "torch/distributed"))
    import collective
    collective.all_reduce()
if how == "elsewhere":
    beat(2, "pause")
if how in ("a step", "goes on"):
    beat(2, "step")
    mine.call("steps").__enter__()
if how in ("elsewhere", "goes on"):
    while not (folder / "dump").exists():
        time.sleep(0.01)
    if how == "goes on":
        beat(3, "step")
    while True:  # each time that it is asked
        (folder / f"flight-{rank}.json").write_text("{}")
        time.sleep(0.01)
if how == "a save":
    for _ in range(3):
        mine.call("save").__enter__()
        time.sleep(0.01)
        mine.leave()
    beat(2, "step")
    mine.call("save").__enter__()
if how == "keeps the lock":
    (folder / f"flight-{rank}.json").write_text("{}")
    beat(19, "step")
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second time it waits, for ever, and lets no other thread run Python
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)
if how in ("a data worker", "a step", "a save"):
    time.sleep(600)
beat(19, "step")
while not (folder / "dump").exists():
    time.sleep(0.01)
if how == "slow":
    beat(20, "step")  # before it answers: the watch looks at once when all have
(folder / f"flight-{rank}.json").write_text("{}")
time.sleep(600)
"""


class Ranks:
    """Two processes, and the watch over them."""

    def __init__(self, folder: Path, *hows: str) -> None:
        self.beats = folder / "beats"
        logs = folder / "logs"
        for path in (self.beats, logs):
            path.mkdir(exist_ok=True)
        self.watch = HangWatch(self.beats, logs, factor=3.0, seconds=0.3, patience=0.3)
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", _RANK, str(self.beats), str(logs), str(rank), how],
                env=environment(),
            )
            for rank, how in enumerate(hows)
        ]

    def found(self) -> Failure | None:
        """What the watch says once no step has ended for long."""
        pids = {rank: process.pid for rank, process in enumerate(self.processes)}
        wait_for(lambda: [b.step for b in read_beats(self.beats)] == [19, 19])
        time.sleep(0.5)
        return self.watch.check(pids, 2)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(*hows: str) -> Ranks:
        made.append(Ranks(tmp_path, *hows))
        return made[-1]

    yield make
    for ranks_made in made:
        for process in ranks_made.processes:
            process.kill()
            process.wait()


def test_a_rank_that_is_stopped_while_it_is_asked_is_named(ranks: Callable[..., Ranks]) -> None:
    """On a busy machine the others answer late, and the signal comes when the watch is already
    looking.
    """
    both = ranks("deaf", "well")

    def stop_it() -> None:
        # the watch has looked which ranks are stopped before it asks
        wait_for(lambda: (both.beats / DUMP).exists())
        os.kill(both.processes[1].pid, signal.SIGSTOP)

    thread = threading.Thread(target=stop_it)
    thread.start()
    failure = both.found()
    thread.join()
    assert failure is not None
    assert failure.rank == 1
    assert failure.why == "it was stopped by a signal (SIGSTOP)"


def test_ranks_that_go_on_while_they_are_asked_were_only_slow(ranks: Callable[..., Ranks]) -> None:
    assert ranks("slow", "slow").found() is None


def test_one_that_goes_on_does_not_excuse_the_other(ranks: Callable[..., Ranks]) -> None:
    failure = ranks("slow", "well").found()
    assert failure is not None
    assert failure.rank == 1
    assert failure.where is not None


def test_ranks_that_go_on_while_one_computes_elsewhere_were_only_slow(
    ranks: Callable[..., Ranks],
) -> None:
    both = ranks("elsewhere", "goes on")
    wait_for(lambda: [beat.step for beat in read_beats(both.beats)] == [2, 2])
    time.sleep(0.5)
    assert not look(both)
    failure = found_in_time(both)
    assert (failure.rank, failure.what[:37]) == (0, "it hangs: it keeps the others waiting")


def test_a_head_that_is_half_written_tells_nothing(tmp_path: Path) -> None:
    """A rank's first head was read between its process and its time: it was said to have kept the
    others waiting since the machine was started.
    """
    path = tmp_path / "beat-0"
    path.write_bytes(struct.pack("<q", 7).ljust(SIZE, b"\0"))
    assert read_beats(tmp_path) == []
    path.write_bytes(HEAD.pack(7, 0, 0, 3.5, 0, 0, 0).ljust(SIZE, b"\0"))
    assert [beat.time for beat in read_beats(tmp_path)] == [3.5]


def test_an_end_that_is_half_written_is_none(tmp_path: Path) -> None:
    data = mapped(tmp_path / "beat-0", create=True)
    write_call(data, Call(1, "save", "", begun=24000.5, ended=0.0))
    write_end(data, 1, 24001.123)
    call = read_call(data, 1)
    assert call is not None
    assert call.ended == 24001.123
    at = data.find(struct.pack("<d", 24001.123))
    data[at + 5 : at + 8] = bytes(3)
    call = read_call(data, 1)
    assert call is not None
    assert call.ended == 0.0


def test_a_stack_that_is_half_written_is_waited_for(ranks: Callable[..., Ranks]) -> None:
    """On a busy machine a rank is interrupted between two lines of it."""
    failure = ranks("in parts", "slow").found()
    assert failure is not None
    assert failure.rank == 0
    assert failure.where is not None
    assert failure.where.endswith("train.py:7 in wait")


def test_a_rank_whose_library_keeps_the_lock_of_python_is_asked_again(
    ranks: Callable[..., Ranks],
) -> None:
    """The thread that answers can't run; faulthandler's own handler, which needs no lock, can."""
    found = ranks("keeps the lock", "well").found()
    assert found is not None
    assert found.rank == 0, found
    assert "does not answer" not in (found.why or "")
    assert re.search(r"<string>:\d+ in <module>", found.where or ""), found


_RUNS_PYTHON = """
import sys, threading
from pathlib import Path
from lockstep.failures.stacks import write_on_request

def count(n):
    yield from range(n)

def calls(n):
    return calls(n - 1) if n else sum(count(20))

def work():
    while True:
        exec("def f(x):\\n    return [y for y in range(x)]\\nf(5)", {})
        calls(20)

def starts_threads():
    while True:
        thread = threading.Thread(target=calls, args=(30,))
        thread.start()
        thread.join()

write_on_request(Path(sys.argv[1]))
for each in (work, work, starts_threads, starts_threads):
    threading.Thread(target=each, daemon=True).start()
print("up", flush=True)
work()
"""


def test_a_rank_that_runs_python_may_be_asked_for_its_stacks_at_any_moment(tmp_path: Path) -> None:
    """A handler that does not take Python's lock reads frames that change: one time in some hundred
    it killed such a rank.
    """
    path = tmp_path / "stacks.txt"
    process = subprocess.Popen(
        [sys.executable, "-c", _RUNS_PYTHON, str(path)],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        for _ in range(100):
            before = path.stat().st_size
            process.send_signal(signal.SIGQUIT)
            wait_for(lambda: process.poll() is not None or path.stat().st_size > before)  # noqa: B023
            assert process.poll() is None, f"it was killed by signal {-process.returncode}"
    finally:
        process.kill()
        process.communicate()
    # the thread that answers wrote them, the main thread's last
    blocks = re.split(r"^(?:Current thread|Thread) ", path.read_text(), flags=re.MULTILINE)
    assert any("in write" in block and "signals.py" in block for block in blocks)


@pytest.mark.fault(
    "hang: a rank of a script is stopped (SIGSTOP)",
    "under `lockstep launch` a script tells no steps; its other ranks wait in a collective",
    "after a minute in which it was stopped, and others were not, it is named with its line",
)
def test_a_stopped_rank_of_a_script_that_tells_no_steps_is_named(
    ranks: Callable[..., Ranks],
) -> None:
    both = ranks("a script", "a script")
    pids = {rank: process.pid for rank, process in enumerate(both.processes)}
    wait_for(lambda: all((both.watch.logs / f"rank-{rank}.stacks.txt").exists() for rank in pids))
    found: list[Failure] = []

    def look() -> bool:
        failure = both.watch.check(pids, 2)
        found.extend([failure] if failure is not None else [])
        return bool(found)

    assert not look()
    os.kill(pids[0], signal.SIGSTOP)
    wait_for(look)
    (failure,) = found
    assert failure.rank == 0
    assert failure.where is not None
    assert "a signal stopped it" in failure.what
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.2)
    both.watch.restart()
    assert not both.watch.check(pids, 2), "a job that is suspended as a whole does not hang"


def look(both: Ranks, *, stop_requested: bool = False) -> list[Failure]:
    pids = {rank: process.pid for rank, process in enumerate(both.processes)}
    failure = both.watch.check(pids, 2, stop_requested=stop_requested)
    return [] if failure is None else [failure]


def found_in_time(both: Ranks, *, stop_requested: bool = False) -> Failure:
    found: list[Failure] = []

    def one() -> bool:
        found.extend(look(both, stop_requested=stop_requested))
        return bool(found)

    wait_for(one)
    return found[0]


@pytest.mark.fault(
    "hang: a data worker is stopped (SIGSTOP)",
    "in a step, an evaluation or a save; torch waits for it without end",
    "after `hang.seconds` it is named as what it is, with its process and its rank",
)
def test_a_stopped_data_worker_is_named_as_one(ranks: Callable[..., Ranks]) -> None:
    both = ranks("a data worker", "a step")
    both.watch.patience = 1000.0
    wait_for(
        lambda: len(list(both.beats.glob("worker-*"))) == 1 and len(read_beats(both.beats)) == 2
    )
    worker = int((both.beats / "worker-0").read_text())
    assert not look(both)
    os.kill(worker, signal.SIGSTOP)
    failure = found_in_time(both)
    assert failure.rank == 0
    assert (
        f"in evaluate, after step 0: a signal stopped its data worker (process {worker})"
        in failure.what
    )


def test_how_long_saves_take_is_learned(ranks: Callable[..., Ranks]) -> None:
    """Of what a rank has done before, nobody waits for the timeout of a collective."""
    both = ranks("a save", "a save")
    both.watch.patience = 1000.0
    # those from which it learns may be slow on a busy machine
    wait_for(lambda: [beat.step for beat in read_beats(both.beats)] == [2, 2])
    failure = found_in_time(both)
    assert re.search(
        r"in save, after step 2: no save for \d+ s, where one usually takes [0-9.]+", failure.what
    )


def _in_a_collective(folder: Path) -> None:
    """Where a stack says that a rank is in a collective of torch's."""
    (folder / "logs/torch/distributed").mkdir(parents=True)
    text = "import time\ndef all_reduce():\n    time.sleep(600)\n"
    (folder / "logs/torch/distributed/collective.py").write_text(text)


def test_a_rank_in_a_collective_of_its_own_is_named_with_those_that_wait_for_it(
    ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    _in_a_collective(tmp_path)
    both = ranks("a collective", "a step")
    both.watch.patience = 1000.0
    failure = found_in_time(both)
    assert failure.rank == 0
    assert "it waits in a collective which the others have not entered" in failure.what
    assert failure.why is not None
    assert failure.why.startswith("the others wait in steps at <string>:")


def test_ranks_that_wait_in_a_collective_do_not_hear_a_signal(
    ranks: Callable[..., Ranks], tmp_path: Path
) -> None:
    _in_a_collective(tmp_path)
    both = ranks("a collective", "a collective")
    wait_for(lambda: len(read_beats(both.beats)) == 2)
    time.sleep(0.5)
    assert not look(both), "nobody waits in a call of Lockstep's: they may know what they do"
    failure = found_in_time(both, stop_requested=True)
    assert failure.why is not None
    assert "it was asked to stop" in failure.why


def test_a_meeting_point_that_never_answers_stops_no_watch() -> None:
    """Behind a link that is cut the library's question waits for ever, and so would the loop that
    watches the ranks.
    """
    cut = threading.Event()
    membership = Membership(lambda: int(cut.wait(60)))
    time.sleep(1.1)
    since = time.monotonic()
    assert [membership() for _ in range(3)] == [0, 0, 0]
    assert time.monotonic() - since < 30, "the question takes a minute"
    with pytest.raises(RunError, match="the rendezvous of the machines has not answered"):
        membership.check(seconds=0.1)
    cut.set()
    membership.check()
    assert membership() == 1
    membership.begin()
    assert membership() == 0, "what was heard before the machines met is old"


def test_a_meeting_point_that_is_gone_is_told() -> None:
    def ask() -> int:
        raise ConnectionError("gone")

    membership = Membership(ask)
    time.sleep(1.1)
    membership()
    membership.check()
    with pytest.raises(ConnectionError):
        membership()


_TALKING = """
import sys, time
import torch.distributed as dist
from lockstep.failures import hang

hang._TELL_SECONDS = 0.0  # it asks the store all the time
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
watch = hang.HangWatch(*sys.argv[1:3], None, 60.0, 60.0)
watch.hear_from(hang.OtherMachines(store, 0, 2))
time.sleep(0.3)
watch.hear_from(None)
"""


def test_a_launcher_that_talks_to_other_machines_ends_with_its_own_code(tmp_path: Path) -> None:
    """The thread came back from the store while the interpreter ended: SIGABRT, after a good run."""
    command = [sys.executable, "-c", _TALKING, str(tmp_path), str(tmp_path)]
    ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("end", ["is killed", "leaves", "lives"])
def test_who_lost_a_peer_waits_for_a_last_beat_only_where_one_can_come(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed rank says nothing more; one that runs may be about to say that it has left."""
    mine = Heartbeat(tmp_path, 0, ranks=2)
    process = os.fork()
    if process == 0:
        other = Heartbeat(tmp_path, 1, ranks=2)
        other.beat(3, "step")
        if end == "leaves":
            other.left()
        if end == "lives":
            signal.pause()
        os._exit(1)
    if end == "lives":
        wait_for(lambda: any(beat.rank == 1 and beat.step == 3 for beat in read_beats(tmp_path)))
    else:
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    try:
        assert list(mine.ranks_that_left()) == ([1] if end == "leaves" else [])
    finally:
        monkeypatch.undo()
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    assert bool(pauses) == (end == "lives")


def test_a_death_on_another_machine_ends_the_wait_for_ranks_that_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No file of this machine shows it: the launcher's word does."""
    here = Heartbeat(None, 0)
    here.tell_other_machines(StoredDepartures(dist.HashStore(), 0, 2, 1))
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        here.note_death()

    monkeypatch.setattr(time, "sleep", pause)
    assert here.ranks_that_left() == {}
    assert len(pauses) == 1, "not for the whole second"


def test_half_of_a_beat_is_never_read(tmp_path: Path) -> None:
    """A rank that had just begun was seen without a time, and told to hang for as long as the
    machine was on.
    """
    beat = Heartbeat(tmp_path, 0)
    beat.beat(1, "step")
    beat.went_forward()
    since = time.monotonic()
    writer = os.fork()
    if writer == 0:
        while True:
            beat.beat(1, "step")
    try:
        for _ in range(3000):
            (read,) = read_beats(tmp_path)
            assert (read.step, read.phase) == (1, "step")
            assert since - 60 < read.time <= time.monotonic()
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    HEAD.pack_into(mapped(tmp_path / "beat-0"), 0, os.getpid(), 0, 0, 0.0, 0, 0, 0)
    assert read_beats(tmp_path) == [], "of which the time is not written yet"
