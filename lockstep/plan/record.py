"""A record of a step: changes of live bytes and costs of operations, with marks between which parts can be repeated.

Nothing here knows torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.costs.hardware import Cost

KINDS = ("activations", "parameters", "gradients", "optimizer", "gathered", "buckets", "stashes")


class Change(NamedTuple):
    """So many bytes of a kind (an index into KINDS) more, or fewer."""

    kind: int
    size: int


class Mark(NamedTuple):
    """A place in a record."""

    label: str


class Region(NamedTuple):
    """What lies between two marks, named by the first of them ('' before any)."""

    label: str
    changes: list[Change]
    cost: Cost


@dataclass
class Record:
    """Changes, costs and marks in order.

    Attributes:
        start: live bytes by kind before the first change.
    """

    items: list[Change | Cost | Mark]
    start: tuple[int, ...] = (0,) * len(KINDS)

    def regions(self) -> list[Region]:
        found = [Region("", [], Cost())]
        for item in self.items:
            if isinstance(item, Mark):
                found.append(Region(item.label, [], Cost()))
            elif isinstance(item, Change):
                found[-1].changes.append(item)
            else:
                found[-1] = found[-1]._replace(cost=found[-1].cost.plus(item))
        return found


@dataclass(frozen=True)
class Peak:
    """The largest number of live bytes, and what it was made of.

    Attributes:
        parts: bytes by kind at that moment.
        at: label of the region in which it was.
    """

    total: int
    parts: dict[str, int]
    at: str = ""


def play(start: Sequence[int], regions: Iterable[Region]) -> Peak:
    """Walk through regions to the peak."""
    live = list(start)
    total = highest = sum(live)
    parts, at = tuple(live), ""
    for label, changes, _ in regions:
        for kind, size in changes:
            live[kind] += size
            total += size
            if total > highest:
                highest, parts, at = total, tuple(live), label
    return Peak(highest, dict(zip(KINDS, parts, strict=True)), at)


def repeated(regions: Sequence[Region], labels: Iterable[str], times: int) -> list[Region]:
    """With each region of these labels there `times` times more."""
    wanted = set(labels)
    found: list[Region] = []
    for region in regions:
        found += [region] * (1 + (times if region.label in wanted else 0))
    return found


def joined(label: str, regions: Iterable[Region]) -> Region:
    """Return regions that follow on one another as one."""
    changes: list[Change] = []
    cost = Cost()
    for region in regions:
        changes += region.changes
        cost = cost.plus(region.cost)
    return Region(label, changes, cost)
