"""Fills the table of what `lockstep verify SCRIPT` has found: one sign for each of its columns.

Tests: tests/verify/test_script.py
"""

from lockstep.verify.comparison_result import (
    ALLOWED,
    DIFFERENT,
    EQUAL,
    NOT_JUDGED,
    NOT_RUN,
    Cause,
    Outcome,
)
from lockstep.verify.script.record import LOCKSTEP

COLUMNS = ("loop", "samples", "random numbers", "first values", "settings", "gradients", "weights")
STEP_COLUMNS = ("gradients", "weights")  # in the order in which a step computes them


def signs_of(outcome: Outcome) -> dict[str, str]:
    """Return the sign of each column."""
    return {column: _sign(outcome, column) for column in COLUMNS}


def _sign(outcome: Outcome, column: str) -> str:
    if outcome.failed or outcome.framework == LOCKSTEP:
        return NOT_RUN
    if column not in STEP_COLUMNS:
        return _sign_for([cause for cause in outcome.causes if cause.column == column])
    if outcome.not_judged:
        return NOT_JUDGED
    first = STEP_COLUMNS[0] if outcome.first is None else outcome.first.aspect
    if STEP_COLUMNS.index(column) < STEP_COLUMNS.index(first):
        return EQUAL
    return _sign_for([cause for cause in outcome.causes if cause.column in STEP_COLUMNS])


def _sign_for(causes: list[Cause]) -> str:
    if not causes:
        return EQUAL
    return DIFFERENT if any(cause.is_error for cause in causes) else ALLOWED
