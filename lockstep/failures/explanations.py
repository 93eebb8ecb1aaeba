"""Explains errors in processes that Lockstep's launcher does not watch.

They run under plain `python`, under torchrun, or in a notebook.

A known error gets a note with its cause and what to do, where it leaves one of Lockstep's calls,
and at the end of the process. A UsageError shows the lines of the user's code alone;
`LOCKSTEP_TRACEBACK=1` shows all of them.
"""

import os
import sys
from types import TracebackType
from typing import Any

from lockstep.diagnose import recognise
from lockstep.errors import LockstepError, UsageError, only_user_code
from lockstep.heartbeat import writer
from lockstep.machine.environment import WORLD, rank_facts

_MARK = "lockstep: "


def install() -> None:
    """Explain errors in this process from now on.

    A script's own `sys.excepthook` is called as before.
    """
    if writer.on_error is add_explanation:
        return
    writer.on_error = add_explanation
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if isinstance(error, Exception) and os.environ.get("LOCKSTEP_TRACEBACK") != "1":
            add_explanation(error)
            if isinstance(error, UsageError):
                trace = only_user_code(trace)
                error.with_traceback(trace)
                error.__suppress_context__ = True
                error.__cause__ = None
        return before(kind, error, trace)

    sys.excepthook = show


def add_explanation(error: BaseException) -> None:
    """Add a note to a known error of torch or of a library, once."""
    if not isinstance(error, Exception) or isinstance(error, LockstepError):
        return
    if os.environ.get(WORLD):
        # This rank may go on without the one that has died, and forget the error; it is explained
        # as the process ends, if it does. Looking through all known errors takes 50 ms.
        return
    if any(note.startswith(_MARK) for note in getattr(error, "__notes__", ())):
        return
    explained = writer.own_heartbeat().explained(error)
    if explained is not None:
        error.add_note(f"{_MARK}{explained}")
        return
    known = recognise(f"{type(error).__name__}: {error}")
    if known is not None and (rank_facts().world_size > 1 or not known.consequence):
        error.add_note(f"{_MARK}{known.name}\n  why: {known.cause}\n  do: {known.fix}")
