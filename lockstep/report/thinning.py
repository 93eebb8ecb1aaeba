"""Keeps a bounded number of a run's rows while its metrics are read, however many there are.

All rows are kept as long as their lines fit into `BUDGET` bytes. Then, of each stretch of rows,
every fourth is kept, and those with the least and the most of the numbers that are looked at for
peaks; and so on, each time it is full.
"""

import json
from collections.abc import Sequence
from typing import Any

from lockstep.report.shapes import number
from lockstep.run_directory.run_files import parse_object

BUDGET = 12 << 20  # bytes of lines; as rows they take some eight times as much
_STRETCH = 16  # rows
_EVERY = 4
_COLUMNS = 8  # at most, that are looked at for peaks


class Thinner:
    """Rows by step, the newest value of each name.

    Those of `peaks` keep their extremes (None: the first names).
    """

    def __init__(self, peaks: Sequence[str] | None = None, budget: int = BUDGET) -> None:
        self._peaks = peaks
        self._budget = budget
        self._size = 0
        # step → line, numbers of the peaks
        self._kept: dict[int, tuple[bytes, list[float | None]]] = {}
        self.dropped = 0

    def add(self, step: int, row: dict[str, Any], line: bytes) -> None:
        """Add the row of a line."""
        before = self._kept.get(step)
        if before is not None:  # one line after another says more of the step, or it was run again
            row = (parse_object(before[0]) or {}) | row
            line = json.dumps(row).encode()
            self._size -= len(before[0])
        if self._peaks is None:
            self._peaks = [
                name
                for name, value in row.items()
                if name not in ("step", "time") and number(value)
            ]
            self._peaks = self._peaks[:_COLUMNS]
        self._kept[step] = line, [number(row.get(name)) for name in self._peaks]
        self._size += len(line)
        if self._size > self._budget:
            self._thin()

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that are kept, by step."""
        lines = (self._kept[step][0] for step in sorted(self._kept))
        return [row for line in lines if (row := parse_object(line)) is not None]

    def _thin(self) -> None:
        """Drop rows so that every stretch keeps its peaks, and rows at even distances."""
        steps = sorted(self._kept)
        chosen = {steps[0], steps[-1]}
        for start in range(0, len(steps), _STRETCH):
            stretch = steps[start : start + _STRETCH]
            chosen.update(stretch[::_EVERY])
            for column in range(len(self._peaks or ())):
                known = [
                    (value, step)
                    for step in stretch
                    if (value := self._kept[step][1][column]) is not None
                ]
                if known:
                    chosen |= {min(known)[1], max(known)[1]}
        if len(chosen) > 0.75 * len(steps):  # many columns whose peaks lie apart
            chosen = {steps[0], steps[-1], *steps[::2]}
        self.dropped += len(steps) - len(chosen)
        self._kept = {step: self._kept[step] for step in steps if step in chosen}
        self._size = sum(len(line) for line, _ in self._kept.values())
