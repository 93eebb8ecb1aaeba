"""Gathers the ranks' measurements on logged steps: phases, memory, utilisation, MFU.

It is one small all-gather, at most about once a second. The next one's step follows from numbers that all ranks have,
so they agree on it. In between nothing is sent and nothing waits.
"""

import math
from collections.abc import Callable
from statistics import median
from typing import Any

from lockstep.monitor.meters import Memory, gpu_utilisation, memory_of_this_rank
from lockstep.monitor.over_ranks import gather, spread
from lockstep.monitor.phases import PAUSES, PHASES, STEP_PHASES, PhaseClock, ddp_wait_seconds

SECONDS_BETWEEN = 1.0
MOST_RANKS_LISTED = 64
_MEMORY = ("allocated", "reserved", "peak", "host", "total")
_NAMES = (*PHASES, *_MEMORY, "gpu_utilisation", "flops", "profile_requested")
Table = dict[str, list[float]]  # name → value of each rank, by rank


class Figures:
    """Gathers measurements and turns them into a record's fields.

    Args:
        clock: this rank's phases.
        memory: reads this rank's memory; tests pass another.
        every: seconds between two gatherings; unset: `SECONDS_BETWEEN`; 0: on every logged step.
    """

    def __init__(
        self, clock: PhaseClock, memory: Callable[[], Memory] = memory_of_this_rank, every: float | None = None
    ) -> None:
        self.clock = clock
        self.flops = 0.0  # floating-point operations of this rank in a full step
        self.peak = 0.0  # floating-point operations per second of one rank's device
        self.peak_source = ""
        self.recomputes = False  # whether `flops` counts recomputed activations twice
        self._memory, self._every = memory, SECONDS_BETWEEN if every is None else every
        self._next = 0
        self._steps = 0

    def count(self) -> None:
        """Count one step."""
        self._steps += 1

    def due(self, step: int, last: bool) -> bool:
        """Return whether to gather after this logged step: the same answer on every rank."""
        return step >= self._next or last

    def collect(self, step: int, profile_requested: bool = False) -> Table:
        """Gather the measurements since the last time; all ranks call it together.

        Args:
            step: the step.
            profile_requested: whether a profile was requested on this rank.
        """
        steps, self._steps = max(1, self._steps), 0
        mine = {**self._phases(steps), **self._memory()._asdict(), "gpu_utilisation": gpu_utilisation()}
        mine |= {"flops": self.flops, "profile_requested": float(profile_requested)}
        rows = gather([mine[name] for name in _NAMES])
        table = {name: [row[column] for row in rows] for column, name in enumerate(_NAMES)}
        table["step"] = [sum(table[name][rank] for name in STEP_PHASES) for rank in range(len(rows))]
        table["own"] = [s - c for s, c in zip(table["step"], table["communication"], strict=True)]
        self._next = step + max(1, math.ceil(self._every / max(1e-9, median(table["step"])))) if self._every else 0
        return table

    def row(self, table: Table) -> dict[str, Any]:
        """Return fields of a `StepRecord`."""
        ranks = len(table["step"])
        fields: dict[str, Any] = {
            "phases": {name: spread(table[name]) for name in PHASES if any(table[name])},
            "memory": {name: spread(table[name]) for name in _MEMORY if any(table[name])},
        }
        if 1 < ranks <= MOST_RANKS_LISTED:
            fields["own_seconds"] = [float(f"{s:.4g}") for s in table["own"]]
        if not any(math.isnan(u) for u in table["gpu_utilisation"]):
            fields["gpu_utilisation"] = spread(table["gpu_utilisation"])
        flops, seconds = sum(table["flops"]), median(table["step"])
        if flops and seconds:
            fields["flops_per_second"] = float(f"{flops / seconds:.6g}")
        if flops and seconds and self.peak:
            fields["hfu" if self.recomputes else "mfu"] = float(f"{flops / seconds / self.peak / ranks:.4g}")
        return fields

    def _phases(self, steps: int) -> dict[str, float]:
        """Return the seconds of each phase per step; for pauses, in total."""
        seconds = self.clock.read()
        hidden = min(ddp_wait_seconds() * steps, seconds["forward_backward"])
        seconds["forward_backward"] -= hidden
        seconds["communication"] += hidden
        return {name: s if name in PAUSES else s / steps for name, s in seconds.items()}
