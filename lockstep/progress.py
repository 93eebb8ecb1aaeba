"""Shows the progress of long work on stderr: a line that is rewritten on a terminal, occasional lines elsewhere.

Short work prints nothing. Does not import torch.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

PATIENCE_SECONDS = 2.0  # before the first line
_EVERY_ON_TERMINAL, _EVERY_IN_PIPE = 0.2, 10.0  # seconds between lines

Advance = Callable[[int], None]


@contextmanager
def progress_of(
    what: str, total: int, *, unit: str = "", shows: bool = True, stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:  # fmt: skip
    """Show the progress of the block.

    Args:
        what: the work: `exporting step-00000100`.
        total: total number of bytes, or of `unit`.
        unit: what is counted; unset: bytes, shown as GB.
        shows: False on ranks that print nothing.

    Yields:
        a function to call with the number of bytes (or units) done since its last call.
    """
    out = stream or sys.stderr
    terminal, start = out.isatty(), clock()
    done, shown, due = 0, False, start + PATIENCE_SECONDS

    def advance(amount: int) -> None:
        nonlocal done, shown, due
        done += amount
        now = clock()
        if now < due or not shows:
            return
        left = (now - start) / max(done, 1) * max(total - done, 0)
        shares = f"{done} of {total} {unit}" if unit else f"{_gigabytes(done)} of {_gigabytes(total)} GB"
        text = f"lockstep: {what}: {shares}, {_minutes(left)} left"
        out.write(f"\r{text}\x1b[K" if terminal else f"{text}\n")
        out.flush()
        shown, due = True, now + (_EVERY_ON_TERMINAL if terminal else _EVERY_IN_PIPE)

    try:
        yield advance
    finally:
        if shown and terminal:
            out.write("\r\x1b[K")
            out.flush()


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.1f}"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
