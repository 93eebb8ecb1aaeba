"""Ends a rank that waits for another one whose script has caught the error of their common call.

Lockstep's launcher sees this itself (`lockstep.launch.hang`). Under torchrun, or without a
launcher, nobody watches, and the rank that caught the error lives on with its connections open:
gloo would wait for the whole of `distributed.timeout_seconds`, and no other thread can call the
wait off. So a thread of the waiting rank ends its process with an explanation. torchrun then stops
the others.

Tests: tests/launch/test_only_some.py
"""

import os
import sys
import threading
import time
from collections.abc import Collection

from lockstep.errors import RunError
from lockstep.heartbeat.files import Call, FailedCall
from lockstep.heartbeat.writer import own_heartbeat
from lockstep.run_files import printable

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
    while True:
        time.sleep(_POLL)
        beat = own_heartbeat()
        found = beat.waits_in_vain()
        factor, seconds = beat.limits
        if found is None or factor is None:
            continue
        call, failed = found
        waited = time.monotonic() - max(failed.time, call.begun, beat.last_forward)
        if waited <= min(seconds, CAUGHT_SECONDS):
            continue
        what, why, fix = caught_error(failed, call, [beat.rank], waited)
        error = RunError(
            f"rank {failed.rank} of {ranks} failed: {what}", where=failed.line, why=why, fix=fix
        )
        sys.stdout.flush()
        sys.stderr.write(f"lockstep: {printable(str(error))}\n")
        sys.stderr.flush()
        os._exit(1)
