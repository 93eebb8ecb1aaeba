"""Known errors: what a text says about its cause, and what to do.

`recognise` searches the tables, the special before the general. A rank's exception is recognised by its text, a rank
that was killed by the end of its log.
"""

from pathlib import Path

from lockstep.diagnose.entry import KnownError
from lockstep.diagnose.errors_collectives import COLLECTIVES
from lockstep.diagnose.errors_machine import MACHINE
from lockstep.diagnose.errors_meeting import MEETING
from lockstep.diagnose.errors_training import TRAINING

FAMILIES = {
    "Meeting": MEETING,
    "Collectives": COLLECTIVES,
    "GPUs, memory, files, processes": MACHINE,
    "Models, gradients, checkpoints, data": TRAINING,
}
TABLE: tuple[KnownError, ...] = tuple(error for family in FAMILIES.values() for error in family)
# What these say often follows from something more special that the same text, or the log, tells of.
_VAGUE = ("a data worker was killed", "the dataset raised", "a peer is gone", "a collective timed out")
_TAIL_BYTES = 16_384


def recognise(text: str, log: Path | None = None) -> KnownError | None:
    """The known error that `text` tells of, if any.

    Args:
        log: looked into where the text is recognised, but vague.
    """
    found = [error for error in TABLE if error.regex.search(text)]
    known = min(found, key=lambda error: error.name in _VAGUE, default=None)
    if known is not None and known.name == "a data worker was killed" and log is not None:
        return recognise(f"{text}\n{tail(log)}")
    return known


def tail(log: Path) -> str:
    """The end of a log, or nothing where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
