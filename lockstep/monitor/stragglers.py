"""Finds the rank that keeps the others waiting, and its slow phase.

Ranks that train together take equally long for a step, because fast ranks wait for slow ones. Their own time, a step
without waiting for others, shows the difference. A rank is reported if its own time was well above the median of the
others' several times in a row.
"""

from collections import Counter
from dataclasses import dataclass
from statistics import median

from lockstep.config import StragglerConfig
from lockstep.monitor.figures import Table
from lockstep.monitor.phases import STEP_PHASES

_OWN_PHASES = tuple(name for name in STEP_PHASES if name != "communication")
_LEAST_SECONDS = 1e-3  # per step; clocks of busy hosts differ by as much anyway


@dataclass(frozen=True)
class Straggler:
    """A slow rank.

    Attributes:
        rank: the rank.
        ratio: its own time over the median of the other ranks' own time.
        phase: the phase with most of the difference.
        seconds: its time in that phase, per step.
        others: the median of the others in that phase, per step.
    """

    rank: int
    ratio: float
    phase: str
    seconds: float
    others: float

    def sentence(self, host: str | None = None) -> str:
        """Return the finding as a sentence."""
        on = f" on {host}" if host else ""
        return (
            f"rank {self.rank}{on} is slow: its own work takes {self.ratio:.2f} × as long as the other ranks';"
            f" {self.phase} {_ms(self.seconds)} per step against {_ms(self.others)}"
        )


class StragglerWatch:
    """Finds ranks that stay slow in the figures of all ranks, and reports each once until it has caught up."""

    def __init__(self, config: StragglerConfig) -> None:
        self._config = config
        self._times: Counter[int] = Counter()

    def look(self, table: Table) -> list[Straggler]:
        """Return the ranks that are slow for the `patience`-th time in a row."""
        named = []
        for rank in range(len(table["own"])):
            slow = self._slow(table, rank)
            self._times[rank] = self._times[rank] + 1 if slow else 0
            if slow and self._times[rank] == self._config.patience:
                named.append(slow)
        return named

    def _slow(self, table: Table, rank: int) -> Straggler | None:
        own, others = table["own"][rank], _others(table["own"], rank)
        if others is None or own < self._config.threshold * others or own - others < _LEAST_SECONDS:
            return None
        phase = max(_OWN_PHASES, key=lambda name: table[name][rank] - (_others(table[name], rank) or 0.0))
        usual = _others(table[phase], rank) or 0.0
        return Straggler(rank, own / max(others, 1e-9), phase, table[phase][rank], usual)


def _others(values: list[float], rank: int) -> float | None:
    rest = values[:rank] + values[rank + 1 :]
    return median(rest) if rest else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
