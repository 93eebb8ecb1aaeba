"""Predicted against measured step times on shaped links, a table for results/plan_time.md. Needs
root.

    python -m benchmarks.plan_time [--write]

Two hosts, as network namespaces with one rank each; computation sleeps, so that cores do not
matter.
"""

import sys

from benchmarks.page import RESULTS, machine, page, tell
from tests.hosts import hosts
from tests.plan.timed import CASES, measure, predict
from tests.ranks import run_ranks

RATES = (100, 200, 400)  # Mbit/s


def main() -> int:
    rows = []
    worst = 0.0
    for rate in RATES:
        with hosts(2, rate=f"{rate}mbit") as two:
            found = run_ranks(measure, 2, CASES, on=two)
        for index, case in enumerate(CASES):
            measured = max(rank[index] for rank in found)
            predicted = predict(case, 2, rate).seconds
            error = predicted / measured - 1
            worst = max(worst, abs(error))
            rows.append(
                f"| {case.name} | {rate} | {measured:.3f} | {predicted:.3f} | {error:+.1%} |"
            )
            print(rows[-1], flush=True)
    text = page(
        "Step times on shaped links: predicted against measured",
        "python -m benchmarks.plan_time --write",
        machine(),
        ["Two hosts, computation sleeps; seconds, the fastest of five steps."],
        "| case | Mbit/s | measured | predicted | error |",
        rows,
        [f"Largest error: {worst:.1%} (goal: 10 %)."],
    )
    tell(text, RESULTS / "plan_time.md" if "--write" in sys.argv else None)
    return 0 if worst <= 0.10 else 1


if __name__ == "__main__":
    sys.exit(main())
