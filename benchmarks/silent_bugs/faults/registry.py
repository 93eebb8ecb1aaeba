"""`Fault`, and the lists of what is judged: `FAULTS` must be found, `SOUND` must pass."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lockstep.machine.environment import rank_facts


def on_rank_1() -> bool:
    return rank_facts().rank == 1


def on_ranks() -> bool:
    return rank_facts().world_size > 1


@dataclass(frozen=True)
class Fault:
    """What verify must find.

    Attributes:
        make: builds it.
        kinds: of a cause that is right.
        names: words that its text must have, any one of each tuple.
        topology: on which it shows.
        settings: of the run.
        steps: number of steps.
    """

    make: Callable[[], Any]
    kinds: tuple[str, ...]
    names: tuple[tuple[str, ...], ...] = ()
    topology: str = "ddp:2"
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int = 2


FAULTS: list[Fault] = []
SOUND: list[Fault] = []


FAULTS: list[Fault] = []
SOUND: list[Fault] = []


def fault(
    *kinds: str, names: str = "", **rest: Any
) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a fault; `names` is words joined by spaces, alternatives by |."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        FAULTS.append(
            Fault(make, kinds, tuple(tuple(word.split("|")) for word in names.split()), **rest)
        )
        return make

    return register


def sound(**rest: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        SOUND.append(Fault(make, (), **rest))
        return make

    return register
