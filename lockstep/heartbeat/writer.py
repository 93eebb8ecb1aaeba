"""The heartbeat of this process: where its rank is, noted as it goes, and calls that are compared.

`called_by_all_ranks` marks public functions; `Heartbeat.enter` notes the call, and raises a
UsageError if another rank of this machine has made another one in its place:

    rank 0     1 evaluate      2 save
    rank 1     1 evaluate      2 state_dict     different calls at the second place

Tests: tests/failures/test_hang.py, tests/failures/test_only_some.py, tests/failures/test_slow.py,
tests/failures/test_stopped.py, tests/faults/test_network_collectives.py
"""

import functools
import json
import mmap
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from lockstep.errors import UsageError, lost_a_peer, only_user_code
from lockstep.heartbeat.call_errors import different_calls, ended_without
from lockstep.heartbeat.callers import callers_line, collective_of, shown
from lockstep.heartbeat.files import (
    FOLDER,
    FORWARD,
    FORWARD_AT,
    HEAD,
    LIMITS,
    PHASES,
    SIZE,
    SLOTS,
    WRITE,
    WRITE_AT,
    Call,
    FailedCall,
    last_call,
    mapped,
    phase_of,
    put,
    read_call,
    read_failure,
    was_killed,
    write_call,
    write_end,
    write_failure,
)
from lockstep.machine.environment import rank_facts

# from the end of a rank's connections to its last beat, if the script ends them itself
_LEAVING_SECONDS = 1.0
# Work that goes forward sooner after it was recorded tells the launcher nothing more.
_FORWARD_SECONDS = 0.01

P = ParamSpec("P")
R = TypeVar("R")


class Departures(Protocol):
    """Tells the ranks of other machines that this one has left.

    Ranks of this machine can't read their files.
    """

    def announce(self, last: Call | None) -> None:
        """Announce that this rank makes no more calls; `last`: the last one that it made."""

    def announced(self) -> dict[int, Call | None]:
        """Return the ranks that have announced it, each with its last call."""


class Heartbeat:
    """A rank's own heartbeat. Without a folder (from a launcher or a rank) it does nothing."""

    def __init__(self, folder: Path | None, rank: int, ranks: int = 1) -> None:
        self.folder = folder
        self._process = os.getpid()
        # a data worker is a fork, whose main thread has the same number
        self._main_thread = threading.main_thread().ident
        self._departures: Departures | None = None  # if there are several machines
        self._death_is_told = False  # the launcher has said that a rank has died
        # `distributed.hang`: factor, or None if nothing is a hang; seconds
        self.limits: tuple[float | None, float] = (None, 0.0)
        self._share(folder, rank, ranks)

    def _share(self, folder: Path | None, rank: int, ranks: int) -> None:
        """Begin to write into a folder, with no calls so far; None: stop."""
        self._shared = folder
        self.rank = rank
        self._ranks = ranks
        self._number = 0
        self._awaits_write = False
        self._writes = 0
        # when work last went forward in the main thread, and in the background
        self._went_forward = [0.0, 0.0]
        self._under_way: list[int] = []  # numbers of nested calls, the outermost first
        self._state: tuple[int, int, float] = (0, PHASES.index("pause"), time.monotonic())
        self._others: dict[int, mmap.mmap] = {}
        self._map: mmap.mmap | None = None
        if folder is not None and folder.is_dir():
            self._map = mapped(folder / f"beat-{rank}", create=True)

    def beat(self, step: int, phase: str) -> None:
        """Record that `step` (from 1) is running."""
        self._state = (step, PHASES.index(phase), time.monotonic())
        self._write_head()

    def enter(self, name: str, line: str) -> None:
        """Record the begin of a call, by a line of the caller's code.

        A UsageError if another rank of this machine makes another one in its place.
        """
        if self._map is None or not self._is_mine():
            return
        self._number += 1
        self._under_way.append(self._number)
        mine = Call(self._number, name, line, begun=time.monotonic(), ended=0.0)
        write_call(self._map, mine)
        self._write_head()

        # Whoever comes second finds the difference: each writes its own call before it looks.
        for rank, beats in self._files_of_others().items():
            other = read_call(beats, self._number)
            if other is not None and other.number == self._number and other.name != name:
                self.leave()
                raise different_calls({self.rank: mine, rank: other})

    def leave(self) -> None:
        """Record the end of the call that was entered last."""
        if self._map is None or not self._under_way or not self._is_mine():
            return  # the call began before this rank shared its calls
        number = self._under_way.pop()
        if number > self._number - SLOTS:  # its slot was not reused
            write_end(self._map, number, time.monotonic())
        self._write_head()

    def failed(self, error: BaseException) -> None:
        """Record that an error ends the outermost call: other ranks may wait in it."""
        outermost = len(self._under_way) == 1 and isinstance(error, Exception)
        if self._map is None or not outermost or not self._is_mine():
            return
        *_, (frame, line) = traceback.walk_tb(only_user_code(error.__traceback__))
        place = f"{shown(frame.f_code.co_filename)}:{line}"
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        call = FailedCall(self.rank, self._number, time.monotonic(), text, place)
        write_failure(self._map, call)

    def waits_in_vain(self) -> tuple[Call, FailedCall] | None:
        """Return this rank's call, and another rank's that an error ended in its place.

        The other rank has caught the error, or is about to end. Any thread may ask.
        """
        under_way = self._under_way[:1]
        if self._map is None or not under_way:
            return None
        mine = read_call(self._map, under_way[0])
        if mine is None or mine.number != under_way[0]:
            return None
        for rank, beats in self._others.items():
            failed = read_failure(beats, rank)
            if failed is not None and failed.number == mine.number:
                return mine, failed
        return None

    def awaited_by(self) -> dict[int, Call]:
        """Return the calls in which ranks of this machine wait, and which this one has not begun.

        It is empty while this rank makes a call itself. Any thread may ask.
        """
        if self._map is None or self._under_way:
            return {}
        newest = {rank: last_call(beats) for rank, beats in self._others.items()}
        return {
            rank: call
            for rank, call in newest.items()
            if call is not None and not call.ended and call.number > self._number
        }

    @property
    def last_forward(self) -> float:
        """Return the time at which this rank's calls last went forward (seconds, monotonic)."""
        if self._map is None:
            return 0.0
        return float(FORWARD.unpack_from(self._map, FORWARD_AT)[0])

    def left(self) -> None:
        """Record that this rank makes no more calls.

        Its script has ended, or it has left the process group.
        """
        self.beat(self._state[0], "left")
        if self._departures is not None and self._map is not None:
            self._departures.announce(last_call(self._map))

    def tell_other_machines(self, departures: Departures | None) -> None:
        """Tell the ranks of other machines, too, that this one has left; None: there are none."""
        self._departures = departures

    def note_death(self) -> None:
        """Note that the launcher has told of a rank's death."""
        self._death_is_told = True

    def see_others(self) -> None:
        """Open the files of the machine's other ranks.

        They can be read after their folder is removed.
        """
        self._files_of_others()

    def ranks_that_left(self) -> dict[int, Call | None]:
        """Return the ranks that have left, each with its last call.

        Wait a moment for their last beats, unless a rank of this machine was killed, or the
        launcher tells of a death on another one: that rank says nothing more, and its end is why
        its peers lost it.
        """
        deadline = time.monotonic() + _LEAVING_SECONDS
        while True:
            found = {} if self._departures is None else self._departures.announced()
            found |= {
                rank: last_call(beats)
                for rank, beats in self._files_of_others().items()
                if phase_of(beats) == "left"
            }
            is_alone = not self._others and self._departures is None
            if is_alone or any(map(was_killed, self._others.values())):
                return found
            if self._death_is_told:
                return found
            if found or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def explain(self, error: BaseException) -> None:
        """Raise a UsageError in place of an error about a lost rank that ended before this call."""
        if (
            not self._under_way
            or not self._is_mine()
            or isinstance(error, UsageError)
            or not lost_a_peer(error)
        ):
            return
        # the outermost one, which is the user's
        mine = None if self._map is None else read_call(self._map, self._under_way[0])
        if mine is None:
            return
        left = {
            rank: last
            for rank, last in self.ranks_that_left().items()
            if last is None or last.number < mine.number
        }
        if left:
            raise ended_without(self.rank, mine, left) from error

    def explained(self, error: BaseException) -> UsageError | None:
        """Return an explanation of a collective's error if another rank ended before it.

        It is for collectives outside of these calls.
        """
        if isinstance(error, UsageError) or not lost_a_peer(error):
            return None
        left = self.ranks_that_left()
        return ended_without(self.rank, collective_of(error), left) if left else None

    def call(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that calls `enter` and `leave` around the block.

        A loop makes one for all of its calls: what makes it and what enters it are one line of the
        caller's code.
        """
        return _CallContext(self, name, "" if self._map is None else callers_line())

    def went_forward(self) -> None:
        """Record that long work goes forward: a sample was read, or bytes were written.

        Data workers call it for their rank, and the thread of a background write for that write.
        """
        if self._map is None:
            return
        now = time.monotonic()
        # each sample comes by here: `threading.main_thread()` would take as long as the rest
        in_background = threading.get_ident() != self._main_thread
        if now - self._went_forward[in_background] >= _FORWARD_SECONDS:
            self._went_forward[in_background] = now
            put(self._map, WRITE_AT if in_background else FORWARD_AT, FORWARD.pack(now))

    @contextmanager
    def background_write(self) -> Iterator[None]:
        """Record a write in the background, from its thread.

        One that raises teaches nothing about the usual time.
        """
        begun = time.monotonic()
        self.went_forward()
        yield
        self._writes += 1
        if self._map is not None:
            now = time.monotonic()
            put(self._map, WRITE_AT, WRITE.pack(now, self._writes, now - begun))

    @contextmanager
    def awaiting_write(self) -> Iterator[None]:
        """Record that the rank waits for the write in the background.

        Such a rank hangs only if the write does not go forward.
        """
        if not self._is_mine():
            yield
            return
        self._awaits_write = True
        self._write_head()
        try:
            yield
        finally:
            self._awaits_write = False
            self._write_head()

    def _is_mine(self) -> bool:
        """Return whether this is the rank's process and main thread.

        Calls of other threads and processes have no order that all ranks share.
        """
        return (
            os.getpid() == self._process and threading.current_thread() is threading.main_thread()
        )

    def _write_head(self) -> None:
        if self._map is not None:
            step, phase, seconds = self._state
            nested = len(self._under_way)
            awaits = self._awaits_write
            head = (self._process, step, phase, seconds, self._number, nested, awaits)
            put(self._map, 0, HEAD.pack(*head))

    def _files_of_others(self) -> dict[int, mmap.mmap]:
        """Return the mapped heartbeat files of this machine's other ranks, as far as they exist."""
        if self._shared is not None and len(self._others) < self._ranks - 1:
            for path in self._shared.glob("beat-*"):
                rank = int(path.name.removeprefix("beat-"))
                if rank != self.rank and rank not in self._others and path.stat().st_size == SIZE:
                    self._others[rank] = mapped(path)
        return self._others


on_error: Callable[[BaseException], None] | None = None  # called with what a public call raises
_mine: Heartbeat | None = None


def own_heartbeat() -> Heartbeat:
    """Return this process's heartbeat, in the folder that the launcher names in the environment."""
    global _mine
    if _mine is None or _mine._process != os.getpid():
        folder = os.environ.get(FOLDER)
        facts = rank_facts()
        _mine = Heartbeat(
            None if folder is None else Path(folder), facts.rank, facts.local_world_size
        )
    return _mine


def begin_anew() -> None:
    """Forget this process's heartbeat: the next one is that of another rank, in another folder."""
    global _mine
    _mine = None


def went_forward() -> None:
    """Record that long work of this rank, in whichever process and thread, goes forward."""
    record = recorder_of_work()
    if record is not None:
        record()


def recorder_of_work() -> Callable[[], None] | None:
    """Return a function that records that work goes forward, or None if nobody reads it.

    It is for loops of many small parts.
    """
    beat = _mine or own_heartbeat()  # a data worker that was forked shares its rank's
    return None if beat._map is None else beat.went_forward


def share_calls(folder: Path, rank: int, ranks: int) -> None:
    """Compare calls in a new folder of the ranks, which no launcher reads.

    The machine's ranks begin it together.
    """
    beat = own_heartbeat()
    if beat.folder is None:
        beat._share(folder, rank, ranks)


def stop_sharing_calls() -> None:
    """Stop comparing calls, if `share_calls` began it."""
    if _mine is not None and _mine.folder is None:
        _mine._share(None, 0, 1)


def called_by_all_ranks(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a public function as one that all ranks call together, under its own name."""
    name = function.__name__

    @functools.wraps(function)
    def called(*args: P.args, **more: P.kwargs) -> R:
        with own_heartbeat().call(name):
            return function(*args, **more)

    return called


def write_limits(factor: float | None, seconds: float, patience: float) -> None:
    """Tell the launcher this run's limits for a hang (`HangWatch`), or this rank without one.

    The launcher has not read the config that a script makes itself.
    """
    beat = own_heartbeat()
    beat.limits = (factor, seconds)
    if beat.folder is not None and beat.folder.is_dir():
        beside = beat.folder / f".limits-{beat.rank}"
        beside.write_text(json.dumps([factor, seconds, patience]))
        beside.rename(beat.folder / LIMITS)


def tell_call(name: str) -> None:
    """Compare a call that begins here with those of other ranks, without timing it."""
    with own_heartbeat().call(name):
        pass


class _CallContext:
    """Calls `enter` and `leave` around a block.

    It is a class, since each step uses it, and a generator would be slower.
    """

    def __init__(self, heartbeat: Heartbeat, name: str, line: str) -> None:
        self._heartbeat = heartbeat
        self._name = name
        self._line = line

    def __enter__(self) -> None:
        self._heartbeat.enter(self._name, self._line)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is not None:
                self._heartbeat.failed(error)
                self._heartbeat.explain(error)
                if on_error is not None:
                    on_error(error)
        finally:
            self._heartbeat.leave()
