"""Stretches of time: their union, what two of them share."""

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Without overlaps, in order."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def length(disjoint: Iterable[Interval]) -> float:
    return sum(end - start for start, end in disjoint)


def shared(one: list[Interval], other: list[Interval]) -> float:
    """How much of two lists of disjoint stretches, each in order, is common to both."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return total


def within(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """Cut to a window."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start, end) for start, end in cut if end > start]
