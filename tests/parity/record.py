"""Run the whole parity matrix and write down what came out.

python -m tests.parity.record
"""

import argparse
import datetime
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

from tests.parity.matrix import STEPS
from tests.parity.parts import HALF_MODES, Limits, Outcome, limits, parts

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "parity_data_parallel.md"


class Row(NamedTuple):
    """Cases of a part that are held to the same limits."""

    name: str
    ranks: int
    outcomes: list[Outcome]

    def text(self) -> str:
        found = [one.found for one in self.outcomes if one.found is not None]
        worst = Limits(*map(max, zip(*found, strict=True))) if found else Limits(0, 0, 0)
        allowed = limits(self.outcomes[0].case)
        good = sum(not one.problem for one in self.outcomes)
        cells = [f"{a:.1e} / {b:.0e}" for a, b in zip(worst, allowed, strict=True)]
        return (
            f"| {self.name} | {self.ranks} | {len(self.outcomes)} | {good} | {' | '.join(cells)} |"
        )


def rows_of(name: str, ranks: int, outcomes: list[Outcome]) -> list[Row]:
    """One row for each limit, so that images do not hide in what language models do."""
    groups: dict[tuple[str, Limits], list[Outcome]] = {}
    for one in outcomes:
        mode = dict(one.case.more).get("precision.mode", "fp32")
        key = name.replace(" and ".join(HALF_MODES), mode) + (
            ", vae" if mode != "fp32" and one.case.model == "vae" else ""
        )
        groups.setdefault((key, limits(one.case)), []).append(one)
    return [Row(key, ranks, found) for (key, _), found in groups.items()]


def page(rows: list[Row], command: str, seconds: float) -> str:
    cases = [one for row in rows for one in row.outcomes]
    problems = [one.problem for one in cases if one.problem]
    lines = [
        "# Data-parallel strategies against one process",
        "",
        (
            f"`{command}`: {len(cases)} cases, {len(cases) - len(problems)} within their limits,"
            f" {seconds:.0f} s; torch {torch.__version__}, {os.cpu_count()} cores (load"
            f" {os.getloadavg()[1]:.1f}), {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC."
        ),
        "",
        (
            f"Losses, gradient norms and counts of valid targets of {STEPS} steps, on every rank,"
            " with dropout, against a"
        ),
        (
            "single process without checkpointing that takes the same micro-batches. Each cell is"
            " the largest relative"
        ),
        (
            "difference that was found, and what is allowed; the reasons for the limits stand in"
            " `tests/parity/parts.py`."
        ),
        "",
        "| cases | ranks | run | within limits | first step | losses | gradient norms |",
        "|---|---|---|---|---|---|---|",
        *(row.text() for row in rows),
        "",
    ]
    return "\n".join([*lines, *(f"- {problem}" for problem in problems), ""] if problems else lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=RESULTS)
    output: Path = parser.parse_args().output
    rows: list[Row] = []
    begin = time.perf_counter()
    for part in parts():
        since = time.perf_counter()
        new = rows_of(part.name, part.ranks, part.run(timeout=2400))
        rows += new
        print(
            "\n".join(row.text() for row in new), f"{time.perf_counter() - since:.0f} s", flush=True
        )
        output.write_text(
            page(rows, "python -m tests.parity.record", time.perf_counter() - begin),
            encoding="utf-8",
        )
    return 1 if any(one.problem for row in rows for one in row.outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
