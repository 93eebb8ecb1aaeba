"""Times the parts of a live recovery, from a rank's death to the end of the first step after it.

    death → noticed  the launcher sees that the process has ended
          → agreed   the rank has read who goes on, and has left its step
          → groups   the old groups are destroyed, and the new ones made
          → placed   the model is built and placed
          → loaded   the run has gone back to the newest copy or checkpoint
          → first_step

A part begins where the one before it ends. Loads no torch.

Tests: tests/run_directory/test_recovery_clock.py, tests/faults/test_live_recovery.py
"""

import time


class RecoveryClock:
    """Times one recovery.

    Args:
        died: when the rank died at the earliest (seconds, monotonic).
    """

    def __init__(self, died: float) -> None:
        self.died = died
        self.seconds: dict[str, float] = {}  # part → seconds, in order
        self._before = died

    def end_of(self, part: str, at: float | None = None) -> None:
        """Note that a part ends, now or at the given moment."""
        now = time.monotonic() if at is None else at
        self.seconds[part] = now - self._before
        self._before = now


_running: RecoveryClock | None = None  # this process's


def begin(died: float, noticed: float) -> None:
    """Begin to time a recovery of this process.

    One that another death has interrupted becomes a part of this one.

    Args:
        died: when the rank died at the earliest (seconds, monotonic).
        noticed: when the launcher saw it.
    """
    global _running
    interrupted = _running
    _running = RecoveryClock(died if interrupted is None else interrupted.died)
    if interrupted is not None:
        _running.end_of("interrupted", died)
    _running.end_of("noticed", noticed)


def is_running() -> bool:
    """Return whether a recovery is timed."""
    return _running is not None


def end_of(part: str) -> None:
    """Note that a part ends now, if a recovery is timed."""
    if _running is not None:
        _running.end_of(part)


def take() -> dict[str, float]:
    """Return the seconds of each part, and end the recovery; empty if none is timed."""
    global _running
    taken = {} if _running is None else _running.seconds
    _running = None
    return taken
