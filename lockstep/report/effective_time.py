"""Divides a run's wall time into what trained it and what did not (effective training time ratio).

    trained    forward, backward, update, of steps that were kept; evaluations
    waited     for data, and for other ranks
    saved      training stood still for a checkpoint
    recovered  starts, restarts and live recoveries: all that is outside of steps
    lost       steps that were trained again, since the run went back behind them

The ratio is the first of these over their sum.

Tests: tests/report/test_effective_time.py, tests/report/test_fleet.py
"""

from collections.abc import Mapping

from lockstep.report.read import RunData, phase_totals

PARTS = ("trained", "waited", "saved", "recovered", "lost")


def effective_time(run: RunData) -> dict[str, float]:
    """Return part → seconds, of the median rank; empty without measurements."""
    totals = phase_totals(run)
    if not totals:
        return {}
    seconds = (event.get("seconds") for event in run.of_kind("lost_steps"))
    lost = sum(value for value in seconds if isinstance(value, int | float) and value > 0)
    # what was lost was in rows which are no longer there: it is a part of the time outside of rows
    lost = min(lost, totals["outside"])
    return {
        "trained": totals["forward_backward"]
        + totals["optimizer"]
        + totals["other"]
        + totals["evaluation"],
        "waited": totals["data"] + totals["communication"],
        "saved": totals["checkpoint"],
        "recovered": totals["outside"] - lost,
        "lost": lost,
    }


def shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Return part → its share of the wall time, that of `trained` is the ratio; empty without any.

    `benchmarks.fleet` divides simulated runs in the same way.
    """
    wall = sum(parts.values())
    return {name: parts[name] / wall for name in PARTS} if wall else {}


def in_words(parts: Mapping[str, float]) -> tuple[str, str]:
    """Return the ratio, and the other parts' shares; both are empty without measurements."""
    share_of = shares(parts)
    if not share_of:
        return "", ""
    others = [f"{name} {share_of[name]:.1%}" for name in PARTS[1:] if share_of[name]]
    return f"{share_of['trained']:.1%}", ", ".join(others)
