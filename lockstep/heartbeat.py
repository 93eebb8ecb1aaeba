"""Records a rank's step and calls in shared memory, for the launcher and the machine's other ranks.

The launcher reads the files to find ranks that hang. Each rank reads the others' files when it
begins a public function with a collective, since a call that only some ranks make would wait for
ever; under another launcher, in a folder that one of them creates. Long work inside a call, such
as a write to a slow disk, says that it goes forward: then it is slow, and does not hang. The clock
is the machine's monotonic one. Does not import torch.

Tests: tests/launch/test_hang.py, tests/launch/test_only_some.py, tests/launch/test_slow.py,
tests/launch/test_stopped.py, tests/faults/test_network_collectives.py
"""

import contextlib
import functools
import json
import mmap
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar

from lockstep.environment import rank_facts
from lockstep.errors import UsageError, lost_a_peer, only_user_code

FOLDER = "LOCKSTEP_HEARTBEATS"  # set by the launcher for its ranks
_LIMITS = "limits.json"
DUMP = "dump"  # a file with this name in the folder requests the ranks' last collectives
# A step; a step without an earlier one to compare with; the caller's code; all steps are done; this
# rank has left.
PHASES = ("step", "first", "pause", "done", "left")
# Process, step, phase, seconds, number of the newest call, depth of nested calls, whether it waits
# for a write.
_HEAD = struct.Struct("<qqqdqqq")
_FORWARD = struct.Struct("<d")  # when the work of the call under way last went forward
_WRITE = struct.Struct(
    "<dqd"
)  # when the background write last went forward, number of whole writes, seconds of the last
_CALL = struct.Struct("<qdd24s160s")  # number from 1, begun, ended or 0, name, the caller's line
_CALLS = 64  # number of calls in a file
_FAILED = struct.Struct(
    "<qd500s160s"
)  # number of a call that an error has ended, or 0; when, text, line
_FORWARD_AT = _HEAD.size
_WRITE_AT = _FORWARD_AT + _FORWARD.size
_CALLS_AT = _WRITE_AT + _WRITE.size
_FAILED_AT = _CALLS_AT + _CALLS * _CALL.size
_SIZE = _FAILED_AT + _FAILED.size
# from the end of a rank's connections to its last beat, if the script ends them itself
_LEAVING_SECONDS = 1.0
_PACKAGE = str(Path(__file__).parent) + os.sep
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_ANY_COLLECTIVE = "a collective"
_NOBODYS = (_PACKAGE, "<frozen ", functools.__file__, contextlib.__file__)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Call:
    """A call that all ranks make together."""

    number: int  # from 1; the same on all ranks for the same call
    name: str  # of the function
    line: str  # the caller's, `file:line`; empty if no line outside of Lockstep called it
    begun: float  # seconds, monotonic
    ended: float  # 0 while the call runs

    def __str__(self) -> str:
        return f"{self.name} at {self.line}" if self.line else self.name


@dataclass(frozen=True)
class Write:
    """The progress of a rank's writes in the background."""

    forward: float = 0.0  # when the one under way last went forward (seconds, monotonic)
    count: int = 0  # of those that have ended well
    seconds: float = 0.0  # that the last of these took


@dataclass(frozen=True)
class FailedCall:
    """A call that an error has ended on one rank; the script may have caught it."""

    rank: int
    number: int
    time: float  # seconds, monotonic
    text: str
    line: str  # of the user's code that raised it, `file:line`


@dataclass(frozen=True)
class Beat:
    """A rank's place, and when it wrote it (seconds, monotonic)."""

    rank: int
    process: int
    step: int
    phase: str
    time: float
    calls: tuple[Call, ...] = ()  # the last ones that it began, by number
    inside: bool = False  # whether the newest of them is running
    awaits_write: bool = False  # whether it does nothing but wait for the write in the background
    forward: float = 0.0  # when the work of its calls last went forward
    write: "Write" = Write()
    failed: "FailedCall | None" = None  # the newest call that an error has ended


class Departures(Protocol):
    """Tells the ranks of other machines that this one has left.

    Ranks of this machine can't read their files.
    """

    def tell(self, last: Call | None) -> None:
        """Say that this rank makes no more calls; `last`: the last one that it made."""

    def told(self) -> dict[int, Call | None]:
        """Return the ranks that have said so."""


class Heartbeat:
    """A rank's own heartbeat. Without a folder (from a launcher or a rank) it does nothing."""

    def __init__(self, folder: Path | None, rank: int, ranks: int = 1) -> None:
        self.folder = folder
        self._process = os.getpid()
        self._departures: Departures | None = None  # if there are several machines
        # `distributed.hang`: factor, or None if nothing is a hang; seconds
        self.limits: tuple[float | None, float] = (None, 0.0)
        self._share(folder, rank, ranks)

    def _share(self, folder: Path | None, rank: int, ranks: int) -> None:
        self._shared = folder
        self.rank = rank
        self._ranks = ranks
        self._number = 0
        self._awaits_write = False
        self._writes = 0
        self._under_way: list[int] = []  # numbers of nested calls, the outermost first
        self._state: tuple[int, int, float] = (0, PHASES.index("pause"), time.monotonic())
        self._others: dict[int, mmap.mmap] = {}
        self._map: mmap.mmap | None = None
        if folder is not None and folder.is_dir():
            self._map = _mapped(folder / f"beat-{rank}", create=True)

    def beat(self, step: int, phase: str) -> None:
        """Record that `step` (from 1) is running."""
        self._state = (step, PHASES.index(phase), time.monotonic())
        self._write_head()

    def enter(self, name: str) -> None:
        """Record the begin of a call.

        A UsageError if another rank of this machine makes another one in its place.
        """
        if self._map is None or not self._is_mine():
            return
        self._number += 1
        self._under_way.append(self._number)
        line = _callers_line()
        at = _CALLS_AT + (self._number - 1) % _CALLS * _CALL.size
        struct.pack_into("<q", self._map, at, 0)  # invalid while it is half written
        _CALL.pack_into(
            self._map,
            at,
            0,
            time.monotonic(),
            0.0,
            name.encode(),
            line.encode(errors="replace")[-160:],
        )
        struct.pack_into("<q", self._map, at, self._number)
        self._write_head()
        for rank, seen in self._seen().items():
            other = _read_call(seen, (self._number - 1) % _CALLS)
            if other is not None and other.number == self._number and other.name != name:
                mine = Call(self._number, name, line, 0.0, 0.0)
                self.leave()
                raise different_calls({self.rank: mine, rank: other})

    def leave(self) -> None:
        """Record the end of the call that was entered last."""
        if self._map is None or not self._under_way or not self._is_mine():
            return  # the call began before this rank shared its calls
        number = self._under_way.pop()
        if number > self._number - _CALLS:  # its slot was not reused
            struct.pack_into(
                "<d",
                self._map,
                _CALLS_AT + (number - 1) % _CALLS * _CALL.size + 16,
                time.monotonic(),
            )
        self._write_head()

    def failed(self, error: BaseException) -> None:
        """Record that an error ends the outermost call: other ranks may wait in it."""
        outermost = len(self._under_way) == 1 and isinstance(error, Exception)
        if self._map is None or not outermost or not self._is_mine():
            return
        *_, (frame, line) = traceback.walk_tb(only_user_code(error.__traceback__))
        place = f"{_shown(frame.f_code.co_filename)}:{line}"
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        now = time.monotonic()
        fields = text.encode(errors="replace")[:500], place.encode(errors="replace")[-160:]
        _FAILED.pack_into(self._map, _FAILED_AT, 0, now, *fields)
        struct.pack_into("<q", self._map, _FAILED_AT, self._number)

    def waits_in_vain(self) -> tuple[Call, FailedCall] | None:
        """Return this rank's call, and another rank's that an error ended in its place.

        The other rank has caught the error, or is about to end. Any thread may ask.
        """
        under_way = self._under_way[:1]
        if self._map is None or not under_way:
            return None
        mine = _read_call(self._map, (under_way[0] - 1) % _CALLS)
        if mine is None or mine.number != under_way[0]:
            return None
        for rank, seen in self._others.items():
            failed = _read_failure(seen, rank)
            if failed is not None and failed.number == mine.number:
                return mine, failed
        return None

    @property
    def last_forward(self) -> float:
        """When the work of this rank's calls last went forward (seconds, monotonic)."""
        if self._map is None:
            return 0.0
        return float(_FORWARD.unpack_from(self._map, _FORWARD_AT)[0])

    def left(self) -> None:
        """Record that this rank makes no more calls.

        Its script has ended, or it has left the process group.
        """
        self.beat(self._state[0], "left")
        if self._departures is not None and self._map is not None:
            self._departures.tell(_last_call(self._map))

    def tell_other_machines(self, departures: Departures | None) -> None:
        """Tell the ranks of other machines, too, that this one has left; None: there are none."""
        self._departures = departures

    def see_others(self) -> None:
        """Open the files of the machine's other ranks.

        They can be read after their folder is removed.
        """
        self._seen()

    def ranks_that_left(self) -> dict[int, Call | None]:
        """Return the ranks that have left, each with its last call.

        Wait a moment for their last beats.
        """
        deadline = time.monotonic() + _LEAVING_SECONDS
        while True:
            found = {} if self._departures is None else self._departures.told()
            found |= {
                rank: _last_call(seen)
                for rank, seen in self._seen().items()
                if _phase(seen) == "left"
            }
            is_alone = not self._others and self._departures is None
            if found or is_alone or time.monotonic() > deadline:
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
        mine = (
            _read_call(self._map, (self._under_way[-1] - 1) % _CALLS)
            if self._map is not None
            else None
        )
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
        return ended_without(self.rank, _collective_of(error), left) if left else None

    def call(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that calls `enter` and `leave` around the block."""
        return _CallContext(self, name)

    def went_forward(self) -> None:
        """Record that long work goes forward: a sample was read, or bytes were written.

        Data workers call it for their rank, and the thread of a background write for that write.
        """
        if self._map is not None:
            in_background = threading.current_thread() is not threading.main_thread()
            struct.pack_into(
                "<d", self._map, _WRITE_AT if in_background else _FORWARD_AT, time.monotonic()
            )

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
            _WRITE.pack_into(self._map, _WRITE_AT, now, self._writes, now - begun)

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
            _HEAD.pack_into(
                self._map, 0, self._process, step, phase, seconds, self._number, nested, awaits
            )

    def _seen(self) -> dict[int, mmap.mmap]:
        if self._shared is not None and len(self._others) < self._ranks - 1:
            for path in self._shared.glob("beat-*"):
                rank = int(path.name.removeprefix("beat-"))
                if rank != self.rank and rank not in self._others and path.stat().st_size == _SIZE:
                    self._others[rank] = _mapped(path)
        return self._others


def different_calls(calls: dict[int, Call]) -> UsageError:
    """Return the error for ranks that make different calls at the same place in their order."""
    by_rank = sorted(calls.items())
    said = ", ".join(f"rank {rank} calls {call.name}" for rank, call in by_rank)
    lines = ", ".join(
        f"rank {rank} at {call.line or 'a line of Lockstep'}" for rank, call in by_rank
    )
    why = (
        "all ranks must make this call: one that only some of them make waits for the others for"
        " ever"
    )
    fix = (
        "call it on every rank, outside of `if is_main_process:`; rank 0 alone then writes the"
        " files"
    )
    return UsageError(
        f"the ranks do not make the same calls: {said}", where=lines, why=why, fix=fix
    )


def ended_without(rank: int, call: Call, left: dict[int, Call | None]) -> UsageError:
    """Return the error for a rank that makes a call before which other ranks have ended.

    `left` has the last calls of those ranks.
    """
    ended = sorted(left.items())
    said = ", ".join(f"rank {other}" for other, _ in ended) + (
        " has" if len(ended) == 1 else " have"
    )
    what = (
        f"the ranks do not make the same calls: rank {rank} calls {call.name}, and {said} ended"
        " without it"
    )
    lines = [f"rank {rank} at {call.line or 'a line of Lockstep'}"]
    lines += [
        f"rank {other} ended after {'no call' if last is None else last}" for other, last in ended
    ]
    why = (
        "all ranks must make this call; one that comes to the end of the script first can't take"
        " part in it"
    )
    fix = (
        "call it on every rank, before `if is_main_process:`, and leave there only what prints or"
        " writes its result"
    )
    return UsageError(what, where=", ".join(lines), why=why, fix=fix)


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


def read_beats(folder: Path) -> list[Beat]:
    """Return the last beats of this machine's ranks, by rank."""
    found = []
    for path in folder.glob("beat-*"):
        data = path.read_bytes()
        if len(data) == _SIZE:
            process, step, phase, seconds, number, depth, awaits = _HEAD.unpack_from(data)
            (forward,) = _FORWARD.unpack_from(data, _FORWARD_AT)
            write = Write(*_WRITE.unpack_from(data, _WRITE_AT))
            if process and 0 <= phase < len(PHASES):
                calls = [
                    call
                    for slot in range(min(number, _CALLS))
                    if (call := _read_call(data, slot)) is not None
                ]
                rank = int(path.name.removeprefix("beat-"))
                by_number = tuple(sorted(calls, key=lambda call: call.number))
                place = rank, process, step, PHASES[phase], seconds
                failed = _read_failure(data, rank)
                found.append(
                    Beat(*place, by_number, depth > 0, bool(awaits), forward, write, failed)
                )
    return sorted(found, key=lambda beat: beat.rank)


def write_limits(factor: float | None, seconds: float, patience: float) -> None:
    """Tell the launcher this run's limits for a hang (`HangWatch`), or this rank without one.

    The launcher has not read the config that a script makes itself.
    """
    beat = own_heartbeat()
    beat.limits = (factor, seconds)
    if beat.folder is not None and beat.folder.is_dir():
        beside = beat.folder / f".limits-{beat.rank}"
        beside.write_text(json.dumps([factor, seconds, patience]))
        beside.rename(beat.folder / _LIMITS)


def read_limits(folder: Path) -> tuple[float | None, float, float] | None:
    """Return the run's limits; None if it has given none."""
    try:
        factor, seconds, patience = json.loads((folder / _LIMITS).read_text())
    except OSError:
        return None
    return factor, seconds, patience


def delete_beats(folder: Path) -> None:
    """Delete all files, before ranks are started again."""
    for path in folder.iterdir():
        path.unlink(missing_ok=True)


class _CallContext:
    """Calls `enter` and `leave` around a block.

    A class, since each step uses it and generators are slower.
    """

    def __init__(self, heartbeat: Heartbeat, name: str) -> None:
        self._heartbeat = heartbeat
        self._name = name

    def __enter__(self) -> None:
        self._heartbeat.enter(self._name)

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if error is not None:
                self._heartbeat.failed(error)
                self._heartbeat.explain(error)
                if on_error is not None:
                    on_error(error)
        finally:
            self._heartbeat.leave()


def _mapped(path: Path, *, create: bool = False) -> mmap.mmap:
    handle = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        if create:
            os.ftruncate(handle, _SIZE)
        return mmap.mmap(handle, _SIZE)
    finally:
        os.close(handle)


def _read_call(data: mmap.mmap | bytes, slot: int) -> Call | None:
    number, begun, ended, name, line = _CALL.unpack_from(data, _CALLS_AT + slot * _CALL.size)
    if not number:
        return None
    name, line = (text.rstrip(b"\0").decode(errors="replace") for text in (name, line))
    return Call(number, name, line, begun, ended)


def _read_failure(data: mmap.mmap | bytes, rank: int) -> FailedCall | None:
    number, when, *texts = _FAILED.unpack_from(data, _FAILED_AT)
    if not number:
        return None
    text, line = (field.rstrip(b"\0").decode(errors="replace") for field in texts)
    return FailedCall(rank, number, when, text, line)


def _phase(data: mmap.mmap) -> str:
    process, _, phase, *_ = _HEAD.unpack_from(data)
    return PHASES[phase] if process and 0 <= phase < len(PHASES) else ""


def _last_call(data: mmap.mmap) -> Call | None:
    number = _HEAD.unpack_from(data)[4]
    return _read_call(data, (number - 1) % _CALLS) if number else None


def _callers_line() -> str:
    """Return the innermost line outside of Lockstep that led here."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_NOBODYS):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{_shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def _collective_of(error: BaseException) -> Call:
    """Return torch's collective that raised the error, with the user's line that called it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    users = {frame for frame, _ in traceback.walk_tb(only_user_code(error.__traceback__))}
    last = max((index for index, (frame, _) in enumerate(frames) if frame in users), default=None)
    if last is None:
        return Call(0, _ANY_COLLECTIVE, "", 0.0, 0.0)
    called = [frame.f_code for frame, _ in frames[last + 1 :]]
    if called and called[0].co_filename.startswith(_PACKAGE):
        called = []  # the collective is one of Lockstep's own
    names = (
        f"torch.distributed.{code.co_name}"
        for code in called
        if code.co_filename.endswith(_COLLECTIVES)
    )
    frame, line = frames[last]
    return Call(
        0, next(names, _ANY_COLLECTIVE), f"{_shown(frame.f_code.co_filename)}:{line}", 0.0, 0.0
    )


@functools.cache
def _shown(path: str) -> str:
    try:
        return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    except FileNotFoundError:  # the working directory is gone
        return path
