"""Defines `Contradiction`: keys that cannot be combined in a config or on these ranks, written once with the message.

Rules are evaluated when a config is loaded, and again at placement with what only ranks know.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from lockstep.errors import UsageError


@dataclass(frozen=True)
class Contradiction:
    """Keys that contradict each other or the ranks, and what to write instead.

    Attributes:
        keys: dotted names of the config's keys.
        what: what is wrong, one sentence without a final full stop.
        fix: what to write.
        why: the reason, if `what` does not make it clear.
    """

    keys: tuple[str, ...]
    what: str
    fix: str
    why: str | None = None


def refuse(contradictions: Iterable[Contradiction]) -> None:
    """Raise the first contradiction, if there is one.

    Raises:
        UsageError: with the keys, the reason and what to write.
    """
    for found in contradictions:
        raise UsageError(found.what, where=", ".join(found.keys), why=found.why, fix=found.fix)
