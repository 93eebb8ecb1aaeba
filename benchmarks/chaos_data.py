"""The data of the kill bench, which kill their own rank inside of a commit when they are told to.

CHAOS_COMMIT=RANK:N kills that rank, in its first start, at its Nth operation on a file below
`checkpoints/`: opening, making, renaming, removing (Python's audit events) or syncing.
"""

import os
import signal
import sys
import threading

from tests.faults.tiny import Points

__all__ = ["Points"]


def _arm(rank: str, calls: int) -> None:
    lock = threading.Lock()
    left = [calls]

    def count(_: object = None) -> None:
        with lock:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link") and any(
            "/checkpoints/" in str(argument) for argument in arguments
        ):
            count()

    sync = os.fsync

    def fsync(handle: int) -> None:
        count()
        sync(handle)

    os.fsync = fsync
    sys.addaudithook(hook)


_rank, _, _calls = os.environ.get("CHAOS_COMMIT", "").partition(":")
if (
    _calls
    and os.environ.get("RANK") == _rank
    and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
):
    _arm(_rank, int(_calls))
