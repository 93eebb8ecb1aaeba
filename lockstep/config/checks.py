"""What can't be said together. Checks that need the world size are the mesh's."""

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.config.schema import Config
from lockstep.errors import UsageError


@dataclass(frozen=True)
class Contradiction:
    """Keys that contradict each other, and what to write instead."""

    keys: tuple[str, ...]
    what: str
    fix: str
    why: str | None = None


def contradictions(config: Config) -> Iterator[Contradiction]:
    return iter(())


def check(config: Config) -> None:
    """Raise UsageError for the first contradiction in `config`."""
    for found in contradictions(config):
        raise UsageError(found.what, where=", ".join(found.keys), why=found.why, fix=found.fix)
