"""Keeps what was found of a training loop, and how far it is.

Tests: tests/verify/test_watch.py, tests/verify/test_sound.py
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LoopFinding:
    """Describes a mistake: its kind, what was seen, what to write, and the user's own line."""

    kind: str
    text: str
    fix: str = ""
    line: str = ""  # at which it shows, as `train.py:40`; empty if none is known


class LoopLog:
    """The findings of a training loop, and the number of its steps.

    Args:
        first: number of steps in which parameters are looked at.
        every: number of steps after which they are looked at again.
        report: is given each finding once.
    """

    def __init__(self, first: int, every: int, report: Callable[[LoopFinding], None]) -> None:
        self.first = first
        self.findings: dict[str, LoopFinding] = {}
        self.steps = 0
        self._every = every
        self._report = report

    @property
    def looks(self) -> bool:
        """Return whether parameters are looked at in this step."""
        return self.steps < self.first or self.steps % self._every == 0

    def find(self, kind: str, text: str, fix: str = "", line: str = "") -> None:
        """Keep a finding, the first of its kind, and the user's own line at which it shows."""
        if kind not in self.findings:
            self.findings[kind] = LoopFinding(kind, text, fix, line)
            self._report(self.findings[kind])

    def end_step(self) -> None:
        """Note that the optimizer has stepped."""
        self.steps += 1
