"""Ends a rank that waits in vain: for one whose script has caught an error, or for all others.

Lockstep's launcher sees this itself (`lockstep.failures.hang`). Under torchrun, or without a
launcher, nobody watches. A rank that caught the error of a common call lives on with its
connections open; one that calls a collective of torch's alone waits for ranks that wait for it in
the next step. gloo would wait for the whole of `distributed.timeout_seconds`, and no other thread
can call the wait off. So a thread of the waiting rank ends its process with an explanation.
torchrun then stops the others.

Tests: tests/failures/test_only_some.py
"""

import os
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress

from lockstep.errors import RunError
from lockstep.heartbeat.callers import collective_under_way
from lockstep.heartbeat.files import Call, FailedCall
from lockstep.heartbeat.writer import Heartbeat, own_heartbeat
from lockstep.machine.output import flush_both
from lockstep.run_directory.run_files import printable

# for a script to end after an error of a call in which the others wait
CAUGHT_SECONDS = 10.0
_POLL = 1.0

_watching = False


def caught_error(
    failed: FailedCall, call: Call, waiting: Collection[int], waited: float
) -> tuple[str, str, str]:
    """Return what has happened, why it is told, and what to do.

    Args:
        failed: the call that an error has ended on one rank.
        call: the same one, in which the ranks `waiting` are.
        waited: seconds.
    """
    what = f"{call.name} ended with an error, which its script caught: {failed.text}"
    ranks = ", ".join(map(str, sorted(waiting)))
    why = f"the others wait for it in {call} for {waited:.0f} s now (ranks {ranks})"
    fix = "let the error end the script, or catch it only where all ranks have it"
    return what, why, fix


def watch_caught_errors(ranks: int) -> None:
    """Watch this rank, of so many, from a thread until its process ends."""
    global _watching
    if not _watching:
        _watching = True
        threading.Thread(target=_watch, args=(ranks,), name="caught-errors", daemon=True).start()


def _watch(ranks: int) -> None:
    """Look again and again, and end the process where it waits in vain."""
    alone_since: dict[str, float] = {}  # by the collective
    while True:
        time.sleep(_POLL)
        beat = own_heartbeat()
        factor, seconds = beat.limits
        if factor is None:
            continue
        error = _of_caught(beat, ranks, min(seconds, CAUGHT_SECONDS))
        error = error or _of_one_alone(beat, ranks, seconds, alone_since)
        if error is not None:
            flush_both()
            with suppress(AttributeError, OSError, ValueError):  # it is closed
                sys.stderr.write(f"lockstep: {printable(str(error))}\n")
            flush_both()
            os._exit(1)


def _of_caught(beat: Heartbeat, ranks: int, seconds: float) -> RunError | None:
    """Return the error if this rank waits for one whose script has caught an error."""
    found = beat.waits_in_vain()
    if found is None:
        return None
    call, failed = found
    waited = time.monotonic() - max(failed.time, call.begun, beat.last_forward)
    if waited <= seconds:
        return None
    what, why, fix = caught_error(failed, call, [beat.rank], waited)
    who = f"rank {failed.rank} of {ranks} failed: {what}"
    return RunError(who, where=failed.line, why=why, fix=fix)


def _of_one_alone(
    beat: Heartbeat, ranks: int, seconds: float, since: dict[str, float]
) -> RunError | None:
    """Return the error if this rank waits in a collective for ranks that wait for it.

    `since` is kept between two looks: when the rank was first seen in the collective, and others
    in a call that it has not begun.
    """
    waiting = beat.awaited_by()
    collective = collective_under_way() if waiting else None
    if collective is None:
        since.clear()
        return None
    now = time.monotonic()
    waited = now - since.setdefault(collective, now)
    if waited <= seconds:
        return None
    others = ", ".join(sorted({str(call) for call in waiting.values()}))
    return RunError(
        f"rank {beat.rank} of {ranks} failed: it hangs: it waits in a collective which the others"
        f" have not entered, for {waited:.0f} s now",
        where=collective,
        why=f"the others wait in {others}",
        fix="all ranks must make the same calls: take it out of `if is_main_process:`",
    )
