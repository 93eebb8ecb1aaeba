"""Describes what `lockstep verify SCRIPT` has found for one number of ranks."""

from dataclasses import dataclass, field

from lockstep.verify.script.fixes import ScriptCause
from lockstep.verify.script.record import LOCKSTEP, TORCH

COLUMNS = ("loop", "samples", "random numbers", "first values", "settings", "gradients", "weights")
STEP_COLUMNS = ("gradients", "weights")  # in the order in which a step computes them


@dataclass
class ScriptDifference:
    """The first difference: `aspect` is a column, `relative` its size."""

    step: int
    aspect: str
    name: str
    relative: float
    rank: int | None = None


@dataclass
class ScriptOutcome:
    """Steps of a script on a number of ranks, compared with one process.

    Attributes:
        steps: number of steps that were compared.
        framework: whose loop it is.
        first: the first difference that is left when random numbers, first values and settings are equal.
        parts: of a first difference of gradients: parameter → size of its own.
        rounding: the largest difference of a gradient that is none.
        causes: of this and of other differences.
        notices: what the comparison takes for granted.
        failed: the error, if the script could not be run.
        not_judged: why gradients and weights can't be compared; empty: they were.
    """

    ranks: int
    steps: int = 0
    framework: str = TORCH
    first: ScriptDifference | None = None
    parts: dict[str, float] = field(default_factory=dict)
    rounding: float = 0.0
    causes: list[ScriptCause] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    failed: str = ""
    not_judged: str = ""

    @property
    def passed(self) -> bool:
        """Return whether the ranks train what one process trains, but for what is other by nature."""
        return not self.failed and not self.not_judged and not any(found.is_error for found in self.causes)

    def mark(self, column: str) -> str:
        """Return the table's sign for a column."""
        if self.failed or self.framework == LOCKSTEP:
            return "-"
        if column not in STEP_COLUMNS:
            found = [one for one in self.causes if one.column == column]
            return "✓" if not found else "✗" if any(one.is_error for one in found) else "≈"
        if self.not_judged:
            return "?"
        found = [one for one in self.causes if one.column in STEP_COLUMNS]
        if not found:
            return "✓"
        first = self.first.aspect if self.first is not None else STEP_COLUMNS[0]
        if STEP_COLUMNS.index(column) < STEP_COLUMNS.index(first):
            return "✓"
        return "✗" if any(one.is_error for one in found) else "≈"
