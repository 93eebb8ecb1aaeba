"""Defines schedules of the learning rate after the warm-up: functions of the number of updates.

Each returns the factor of the peak learning rate. A user's own schedule is such a function in any package, written
`training.lr_schedule: package.module:name`.
"""

import math
from typing import Protocol


class ScheduleContext(Protocol):
    """The arguments of a schedule."""

    @property
    def total(self) -> int:
        """Updates in the whole run."""

    @property
    def warmup(self) -> int:
        """Updates over which the rate rises to its peak."""

    @property
    def min_ratio(self) -> float:
        """Final rate over peak rate."""

    @property
    def decay_ratio(self) -> float:
        """Fraction of `total` at the end in which `wsd` falls."""


def constant(updates: int, schedule: ScheduleContext) -> float:
    """Return 1: the rate stays at its peak."""
    return 1.0


def linear(updates: int, schedule: ScheduleContext) -> float:
    """Fall in a straight line from the end of the warm-up."""
    return _left(1 - _progress(updates, schedule.warmup, schedule.total), schedule)


def cosine(updates: int, schedule: ScheduleContext) -> float:
    """Fall in one half-cosine from the end of the warm-up."""
    return _left(0.5 * (1 + math.cos(math.pi * _progress(updates, schedule.warmup, schedule.total))), schedule)


def warmup_stable_decay(updates: int, schedule: ScheduleContext) -> float:
    """Stay at the peak, and fall in a straight line over the last updates."""
    start = max(schedule.warmup, schedule.total - round(schedule.total * schedule.decay_ratio))
    return _left(1 - _progress(updates, start, schedule.total), schedule)


def _progress(updates: int, start: int, total: int) -> float:
    return min(1.0, max(0.0, (updates - start) / max(1, total - start)))


def _left(shape: float, schedule: ScheduleContext) -> float:
    return schedule.min_ratio + (1 - schedule.min_ratio) * shape
