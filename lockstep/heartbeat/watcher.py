"""What the launcher reads of its ranks, and clears before it starts them again.

Tests: tests/failures/test_hang.py, tests/failures/test_slow.py, tests/failures/test_stopped.py
"""

import json
from pathlib import Path

from lockstep.heartbeat.files import (
    FORWARD,
    FORWARD_AT,
    HEAD,
    LIMITS,
    PHASES,
    SIZE,
    SLOTS,
    WRITE,
    WRITE_AT,
    Beat,
    Write,
    read_call,
    read_failure,
)


def read_beats(folder: Path) -> list[Beat]:
    """Return the last beats of this machine's ranks, by rank."""
    found = []
    for path in folder.glob("beat-*"):
        data = path.read_bytes()
        beat = _beat_of(int(path.name.removeprefix("beat-")), data) if len(data) == SIZE else None
        if beat is not None:
            found.append(beat)
    return sorted(found, key=lambda beat: beat.rank)


def _beat_of(rank: int, data: bytes) -> Beat | None:
    """Return what stands in a rank's file; None if it has written nothing.

    A head that is just being written for the first time has a process before it has a time.
    """
    process, step, phase, seconds, number, depth, awaits = HEAD.unpack_from(data)
    if not process or not seconds or not 0 <= phase < len(PHASES):
        return None
    calls = [read_call(data, slot) for slot in range(1, min(number, SLOTS) + 1)]
    (forward,) = FORWARD.unpack_from(data, FORWARD_AT)
    return Beat(
        rank,
        process,
        step,
        PHASES[phase],
        seconds,
        calls=tuple(sorted(filter(None, calls), key=lambda call: call.number)),
        inside=depth > 0,
        awaits_write=bool(awaits),
        forward=forward,
        write=Write(*WRITE.unpack_from(data, WRITE_AT)),
        failed=read_failure(data, rank),
    )


def read_limits(folder: Path) -> tuple[float | None, float, float] | None:
    """Return the run's limits; None if it has given none."""
    try:
        factor, seconds, patience = json.loads((folder / LIMITS).read_text())
    except OSError:
        return None
    return factor, seconds, patience


def delete_beats(folder: Path) -> None:
    """Delete all files, before ranks are started again."""
    for path in folder.iterdir():
        path.unlink(missing_ok=True)
