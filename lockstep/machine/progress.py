"""Shows the progress of long work on stderr.

On a terminal one line is rewritten; elsewhere there are occasional lines.

Short work prints nothing. Does not import torch.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

from lockstep.machine.output import flush, is_terminal

PATIENCE_SECONDS = 2.0  # before the first line
# seconds between lines
_EVERY_ON_TERMINAL = 0.2
_EVERY_IN_PIPE = 10.0

Advance = Callable[[int], None]


@contextmanager
def progress_of(
    what: str,
    total: int,
    *,
    unit: str = "",
    shows: bool = True,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Show the progress of the block.

    Yield a function to call with the amount done since its last call.

    Args:
        what: the work: `exporting step-00000100`.
        total: number of bytes, shown as GB, or of `unit`.
        shows: False on ranks that print nothing.
    """
    out = stream or sys.stderr
    terminal = is_terminal(out)
    start = clock()
    done = 0
    shown = False
    due = start + PATIENCE_SECONDS

    def advance(amount: int) -> None:
        """Note that more is done, and write a line if the last one is old enough."""
        nonlocal done, shown, due
        done += amount
        now = clock()
        if now < due or not shows:
            return
        left = int((now - start) / max(done, 1) * max(total - done, 0))
        shares = (
            f"{done} of {total} {unit}" if unit else f"{done / 1e9:.1f} of {total / 1e9:.1f} GB"
        )
        text = f"lockstep: {what}: {shares}, {left // 60}:{left % 60:02d} left"
        written = f"\r{text}\x1b[K" if terminal else f"{text}\n"
        with suppress(AttributeError, OSError, ValueError):  # it is closed, or on a full disk
            out.write(written)
            flush(out)
        shown = True
        due = now + (_EVERY_ON_TERMINAL if terminal else _EVERY_IN_PIPE)

    try:
        yield advance
    finally:
        if shown and terminal:
            out.write("\r\x1b[K")
            out.flush()
