"""A record of live bytes: a list of changes with marks in it, which can be cut at marks, repeated and played.

Nothing here knows torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("activations", "parameters", "gradients", "optimizer", "gathered", "buckets", "stashes")


class Change(NamedTuple):
    """So many bytes of a kind (an index into KINDS) more, or fewer."""

    kind: int
    size: int


class Mark(NamedTuple):
    """A place in a record."""

    label: str


@dataclass
class Record:
    """Changes and marks in order.

    Attributes:
        start: live bytes by kind before the first change.
    """

    items: list[Change | Mark]
    start: tuple[int, ...] = (0,) * len(KINDS)

    def regions(self) -> list[tuple[str, list[Change]]]:
        """(label, changes until the next mark); what lies before the first mark has the label ''."""
        found: list[tuple[str, list[Change]]] = [("", [])]
        for item in self.items:
            if isinstance(item, Mark):
                found.append((item.label, []))
            else:
                found[-1][1].append(item)
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


def play(start: Sequence[int], regions: Iterable[tuple[str, list[Change]]]) -> tuple[Peak, tuple[int, ...]]:
    """Walk through regions; returns the peak, and what is live at the end."""
    live = list(start)
    total = highest = sum(live)
    parts, at = tuple(live), ""
    for label, changes in regions:
        for kind, size in changes:
            live[kind] += size
            total += size
            if total > highest:
                highest, parts, at = total, tuple(live), label
    return Peak(highest, dict(zip(KINDS, parts, strict=True)), at), tuple(live)


def repeated(regions: Sequence[tuple[str, list[Change]]], label: str, times: int) -> list[tuple[str, list[Change]]]:
    """With each region called `label` there `times` times more."""
    found: list[tuple[str, list[Change]]] = []
    for region in regions:
        found.append(region)
        if region[0] == label:
            found += [region] * times
    return found
