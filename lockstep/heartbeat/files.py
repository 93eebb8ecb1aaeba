"""What stands in a rank's file, byte by byte, and the names in the folder of a machine's ranks.

    beat-0           of rank 0: head, when work went forward, background writes, last calls, and the
                     newest of these that an error has ended
    limits.json      the run's limits for a hang
    dump             requests the ranks' last collectives

A call has a slot, its number modulo the slots: call 65 overwrites call 1. While it is half written
its number is 0, so that a reader in another process takes it for none.

Tests: tests/failures/test_hang.py, tests/failures/test_only_some.py
"""

import mmap
import os
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

from lockstep.machine.processes import is_running

FOLDER = "LOCKSTEP_HEARTBEATS"  # set by the launcher for its ranks
LIMITS = "limits.json"
DUMP = "dump"  # a file with this name in the folder requests the ranks' last collectives
# A step; a step without an earlier one to compare with; the caller's code; all steps are done; this
# rank has left.
PHASES = ("step", "first", "pause", "done", "left")
# Process, step, phase, seconds, number of the newest call, depth of nested calls, whether it waits
# for a write.
HEAD = struct.Struct("<qqqdqqq")
FORWARD = struct.Struct("<d")  # when the work of the call under way last went forward
# when the background write last went forward, number of complete writes, seconds of the last
WRITE = struct.Struct("<dqd")
CALL = struct.Struct("<qdd24s160s")  # number from 1, begun, ended or 0, name, the caller's line
SLOTS = 64  # calls in a file
# number of a call that an error has ended, or 0; when, text, line
FAILED = struct.Struct("<qd500s160s")
FORWARD_AT = HEAD.size
WRITE_AT = FORWARD_AT + FORWARD.size
_CALLS_AT = WRITE_AT + WRITE.size
_FAILED_AT = _CALLS_AT + SLOTS * CALL.size
SIZE = _FAILED_AT + FAILED.size
_ENDED_IN_CALL = 16  # bytes of a call before the time of its end
_NUMBER = struct.Struct("<q")  # of a call, the first of its fields


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
    count: int = 0  # writes that have ended well
    seconds: float = 0.0  # the time that the last of these took


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
    write: Write = Write()
    failed: FailedCall | None = None  # the newest call that an error has ended


def mapped(path: Path, *, create: bool = False) -> mmap.mmap:
    """Map a rank's file into memory."""
    handle = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0), 0o600)
    try:
        if create:
            os.ftruncate(handle, SIZE)
        return mmap.mmap(handle, SIZE)
    finally:
        os.close(handle)


def put(data: mmap.mmap, at: int, packed: bytes) -> None:
    """Write bytes at once, since other processes read meanwhile.

    `Struct.pack_into` fills their place with zeros first: a rank that had just begun its first call
    was seen without a time, as one that has hung since the machine was started.
    """
    data[at : at + len(packed)] = packed


def write_call(data: mmap.mmap, call: Call) -> None:
    """Write a call that has begun to its slot; readers of other processes see all of it or none."""
    at = _slot_of(call.number)
    line = call.line.encode(errors="replace")[-160:]
    put(data, at, _NUMBER.pack(0))
    put(data, at, CALL.pack(0, call.begun, call.ended, call.name.encode(), line))
    put(data, at, _NUMBER.pack(call.number))


def write_end(data: mmap.mmap, number: int, seconds: float) -> None:
    """Write down when a call ended."""
    put(data, _slot_of(number) + _ENDED_IN_CALL, FORWARD.pack(seconds))


def read_call(data: mmap.mmap | bytes, number: int) -> Call | None:
    """Return the call in the slot of a number; it may be another one, and None if there is none."""
    found, begun, ended, name, line = CALL.unpack_from(data, _slot_of(number))
    if not found:
        return None
    name, line = (text.rstrip(b"\0").decode(errors="replace") for text in (name, line))
    # an end of which only the lower bytes are written is a time before the beginning
    return Call(found, name, line, begun, ended if ended >= begun else 0.0)


def write_failure(data: mmap.mmap, call: FailedCall) -> None:
    """Write down the call that an error has ended."""
    text = call.text.encode(errors="replace")[:500]
    line = call.line.encode(errors="replace")[-160:]
    put(data, _FAILED_AT, FAILED.pack(0, call.time, text, line))
    put(data, _FAILED_AT, _NUMBER.pack(call.number))


def read_failure(data: mmap.mmap | bytes, rank: int) -> FailedCall | None:
    """Return the newest call of a rank that an error has ended; None if there is none."""
    number, when, *texts = FAILED.unpack_from(data, _FAILED_AT)
    if not number:
        return None
    text, line = (field.rstrip(b"\0").decode(errors="replace") for field in texts)
    return FailedCall(rank, number, when, text, line)


def _slot_of(number: int) -> int:
    return _CALLS_AT + (number - 1) % SLOTS * CALL.size


def phase_of(data: mmap.mmap) -> str:
    """Return the phase that a rank is in; "" if it has written none."""
    process, _, phase, *_ = HEAD.unpack_from(data)
    return PHASES[phase] if process and 0 <= phase < len(PHASES) else ""


def was_killed(data: mmap.mmap) -> bool:
    """Return whether a rank's process has ended without saying that it leaves."""
    process = HEAD.unpack_from(data)[0]
    if not process or sys.platform != "linux" or is_running(process):
        return False
    return phase_of(data) != "left"  # read when it can't be written any more


def last_call(data: mmap.mmap) -> Call | None:
    """Return the newest call of a rank; None if it has made none."""
    number = HEAD.unpack_from(data)[4]
    return read_call(data, number) if number else None
