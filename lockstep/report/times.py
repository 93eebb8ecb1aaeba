"""Where a run's wall time went, from its gathered rows and its events."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from lockstep.report.read import Row, Run

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
    """A phase of a gathered row: 0 least, 1 median, 2 most over ranks, in seconds."""
    found: Any = row["phases"].get(phase)
    return float(found[place]) if found else 0.0


def settled(rows: Sequence[Row]) -> list[Row]:
    """Without the first quarter, at least the first row: steps that warm up say nothing about the rest."""
    return list(rows[max(1, len(rows) // 4) :]) or list(rows)


def step_shares(run: Run) -> dict[str, float]:
    """Phase → its share of a typical step, of the rank in the middle; empty where nothing was measured."""
    rows = settled(run.gathered)
    typical = {phase: median([of(row, phase) for row in rows]) for phase in STEP_PHASES} if rows else {}
    total = sum(typical.values())
    return {phase: value / total for phase, value in typical.items()} if total else {}


def typical_step(run: Run) -> float:
    """Seconds of a step, the median over the settled rows; 0 where nothing is known."""
    values = [row["step_seconds"] for row in settled(run.rows) if row.get("step_seconds")]
    return float(median(values)) if values else 0.0


def wall_seconds(run: Run) -> float:
    """From the first that was heard of the run to the last."""
    times = [event["time"] for event in run.events] + [row["time"] for row in run.rows if row.get("time")]
    return max(times) - min(times) if times else 0.0


def totals(run: Run) -> dict[str, float]:
    """Phase → seconds over the whole run; what no row accounts for is `outside`."""
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
