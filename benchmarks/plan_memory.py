"""Predicted against measured peaks of live tensors, a table for results/plan_memory.md, or
plan_memory_axes.md.

    python -m benchmarks.plan_memory [--ranks 2] [--only WORDS] [--write]

Measured: a real step on gloo ranks, every tensor followed from the operation that makes it to its
last reference. Predicted: the same step on fake tensors in one process. On four ranks: tensor,
context and expert, beside the others.
"""

import argparse
import sys

from benchmarks.page import RESULTS, page, tell
from tests.plan.measured import Case, errors_of, grid, measure, predict
from tests.ranks import run_ranks


def table(cases: list[Case], ranks: int) -> tuple[list[str], float]:
    """Rows of the table, and the largest error."""
    found = run_ranks(measure, ranks, cases, timeout=1500)
    rows = []
    worst = 0.0
    for index, case in enumerate(cases):
        measured = [rank[index] for rank in found]
        if any(isinstance(m, str) for m in measured):
            rows.append(
                f"| {case.model} | {case.strategy} | {case.checkpointing} | {ranks} | {measured[0]}"
                " | | |"
            )
            worst = float("inf")
            continue
        try:
            predicted = predict(case, ranks)
        except Exception as error:
            rows.append(
                f"| {case.model} | {case.strategy} | {case.checkpointing} | {ranks} | |"
                f" {error!r:.200} | |"
            )
            worst = float("inf")
            continue
        error = max(errors_of(case, predicted, measured), key=abs)
        worst = max(worst, abs(error))
        rows.append(
            f"| {case.model} | {case.strategy} | {case.checkpointing} | {ranks} | {_all(measured)}"
            f" | {_all(predicted)} | {error:+.2%} |"
        )
    return rows, worst


def _all(values: list[int]) -> str:
    return ", ".join(f"{value / 2**20:.2f}" for value in values)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    cases = [
        c for c in grid(given.ranks) if given.only in f"{c.model} {c.strategy} {c.checkpointing}"
    ]
    rows, worst = table(cases, given.ranks)
    text = page(
        "Peak of live tensors in a step, per rank: predicted against measured",
        "python -m benchmarks.plan_memory --ranks"
        f" {given.ranks}{f' --only {given.only}' * bool(given.only)} --write",
        "",
        [
            "MiB of each rank; the third step of a run, fp32, AdamW. Ranks that share out experts"
            " get as many rows as routers send them, and a plan counts on even loads: there the"
            " error is that of the mean over ranks."
        ],
        "| model | strategy | checkpointing | ranks | measured | predicted | error |",
        rows,
        [f"Largest error: {worst:.2%} (goal: 5 %)."],
    )
    name = "plan_memory.md" if given.ranks == 2 else "plan_memory_axes.md"
    tell(text, RESULTS / name if given.write else None)
    return 0 if worst <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
