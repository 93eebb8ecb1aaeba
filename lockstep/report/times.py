"""Accounts for a run's wall time, from its rows with figures over ranks and its events."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from lockstep.report.read import Row, RunData

STEP_PHASES = ("data", "forward_backward", "communication", "optimizer", "other")
PAUSES = ("evaluation", "checkpoint")
NAMES = {
    "data": "waiting for data",
    "forward_backward": "forward and backward",
    "communication": "waiting for other ranks",
    "optimizer": "optimizer",
    "other": "other",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "outside": "starts and gaps",
}


def of(row: Row, phase: str, place: int = 1) -> float:
    """Return the seconds of a phase of a row: 0 least, 1 median, 2 most over ranks."""
    found: Any = row["phases"].get(phase)
    return float(found[place]) if found else 0.0


def after_warmup(rows: Sequence[Row]) -> list[Row]:
    """Leave out the first quarter, at least one row: steps that warm up do not represent the rest."""
    return list(rows[max(1, len(rows) // 4) :]) or list(rows)


def step_shares(run: RunData) -> dict[str, float]:
    """Return the share of each phase in a typical step, of the median rank; empty without measurements."""
    rows = after_warmup(run.gathered)
    typical = {phase: median([of(row, phase) for row in rows]) for phase in STEP_PHASES} if rows else {}
    total = sum(typical.values())
    return {phase: value / total for phase, value in typical.items()} if total else {}


def typical_step(run: RunData) -> float:
    """Return the seconds of a step, the median over rows after the warm-up; 0 without measurements."""
    values = [row["step_seconds"] for row in after_warmup(run.rows) if row.get("step_seconds")]
    return float(median(values)) if values else 0.0


def wall_seconds(run: RunData) -> float:
    """Return the seconds between the first and the last sign of the run."""
    times = [event["time"] for event in run.events] + [row["time"] for row in run.rows if row.get("time")]
    return max(times) - min(times) if times else 0.0


def totals(run: RunData) -> dict[str, float]:
    """Return the seconds of each phase over the whole run; time outside of all rows is `outside`."""
    sums = dict.fromkeys((*STEP_PHASES, *PAUSES), 0.0)
    before = 0
    restarts = [event["step"] for event in run.of_kind("resume") if isinstance(event.get("step"), int)]
    for row in run.gathered:
        begun = max([before, *(step for step in restarts if step < row["step"])])
        for phase in STEP_PHASES:
            sums[phase] += of(row, phase) * (row["step"] - begun)
        for phase in PAUSES:
            sums[phase] += of(row, phase, 2)
        before = row["step"]
    if not run.gathered:
        return {}
    sums["outside"] = max(0.0, wall_seconds(run) - sum(sums.values()))
    return sums
