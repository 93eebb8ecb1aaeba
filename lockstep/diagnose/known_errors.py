"""Finds the cause of an error and a fix in the tables of known errors.

`recognise` prefers specific entries to general ones. A rank's exception is recognised by its text, and a killed rank by
the end of its log.
"""

from pathlib import Path

from lockstep.diagnose.entry import KnownError
from lockstep.diagnose.errors_machine import MACHINE
from lockstep.diagnose.errors_network import COLLECTIVES, RENDEZVOUS
from lockstep.diagnose.errors_training import TRAINING

FAMILIES = {
    "Rendezvous": RENDEZVOUS,
    "Collectives": COLLECTIVES,
    "GPUs, memory, files, processes": MACHINE,
    "Models, gradients, checkpoints, data": TRAINING,
}
TABLE: tuple[KnownError, ...] = tuple(error for family in FAMILIES.values() for error in family)
# These often follow from a more specific error, which the same text or the log shows.
_VAGUE = ("a data worker was killed", "the dataset raised", "a peer is gone", "a collective timed out")
_TAIL_BYTES = 16_384


def recognise(text: str, log: Path | None = None) -> KnownError | None:
    """Return the known error in `text`, if any.

    Args:
        text: an error's text.
        log: searched too if the text is recognised, but vague.
    """
    found = [error for error in TABLE if error.regex.search(text)]
    known = min(found, key=lambda error: error.name in _VAGUE, default=None)
    if known is not None and known.name == "a data worker was killed" and log is not None:
        return recognise(f"{text}\n{tail(log)}")
    return known


def tail(log: Path) -> str:
    """Return the end of a log; empty if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
