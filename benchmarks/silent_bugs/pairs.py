"""Judges pairs of programs with `lockstep compare A B`: ten are the same training, ten are not.

What makes a pair differ was written down before it was compared for the first time.

python -m benchmarks.silent_bugs.pairs [--only NAME …] [--out benchmarks/results/compare.md]
"""

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page import machine, page, table, tell
from lockstep.machine.scratch import temporary
from lockstep.verify.compare_command import Program
from lockstep.verify.comparison_result import Outcome
from lockstep.verify.launchers import PlainScript
from lockstep.verify.script.pairs.pair import compare_scripts

SCRIPT = Path(__file__).parent / "scripts" / "pair.py"
STEPS = 3


@dataclass(frozen=True)
class Pair:
    """Two ways to write `scripts/pair.py`, and what compare must say of them.

    Attributes:
        b: how B is written, beside what A is.
        kind: of the cause; empty: the two are the same training.
        both: how both are written.
        ranks: number of ranks of each.
    """

    b: str
    kind: str = ""
    both: str = ""
    ranks: int = 1

    @property
    def name(self) -> str:
        """How B is written, and on how many ranks."""
        return self.b + (f" on {self.ranks} ranks" if self.ranks > 1 else "")


PAIRS = (
    Pair("as it is"),
    Pair("manual loss"),
    Pair("unfused mean"),
    Pair("renamed"),
    Pair("one by one"),
    Pair("recomputed"),
    Pair("compiled"),
    Pair("workers"),
    Pair("sharded", ranks=2),
    Pair("by hand", ranks=2),
    Pair("rate", "settings"),
    Pair("no decay", "settings"),
    Pair("first values", "first values"),
    Pair("order", "samples"),
    Pair("noise", "random numbers"),
    Pair("dropout", "computation"),
    Pair("smoothed", "computation"),
    Pair("other activation", "computation"),
    Pair("undivided", "computation", both="accumulated"),
    Pair("clipped", "clipping"),
    Pair("other optimizer", "optimizer"),
    Pair("autocast", "precision"),
)


def judge(pair: Pair) -> Outcome:
    """Compare the two of a pair."""
    both = [pair.both] if pair.both else []
    with temporary("pairs") as folder:
        a, b = (
            Program(PlainScript(str(SCRIPT), (*both, *ways)), ranks=None).runs(name, STEPS, folder)
            for name, ways in (("a", []), ("b", [pair.b]))
        )
        return compare_scripts(a, b, pair.ranks, folder)


def is_right(pair: Pair, outcome: Outcome) -> bool:
    """Return whether the two are told apart, and by their cause, if they are other training."""
    if not pair.kind:
        return outcome.passed
    return not outcome.passed and [cause.kind for cause in outcome.causes] == [pair.kind]


def row(pair: Pair, outcome: Outcome, seconds: float) -> str:
    """Return the row of the table."""
    said = "; ".join(f"{cause.kind}: {cause.text}" for cause in outcome.causes)
    cells = (
        pair.name,
        pair.kind or "the same",
        outcome.result,
        "✓" if is_right(pair, outcome) else "✗",
        " ".join((said or outcome.failed).split())[:160].replace("|", "/"),
        outcome.operation[:160].replace("|", "/"),
        f"{seconds:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    right = []
    for pair in PAIRS:
        if given.only is None or pair.name in given.only:
            began = time.monotonic()
            outcome = judge(pair)
            rows.append(row(pair, outcome, time.monotonic() - began))
            right.append(is_right(pair, outcome))
            print(rows[-1], flush=True)
    goals = [f"| pairs judged right, all | {sum(right)} of {len(right)} |"]
    words = [
        *table("| goal | shown |", goals),
        "",
        "A is `scripts/pair.py` as it is, and B is written otherwise, or is other training.",
        "The machine's load is in the seconds.",
    ]
    text = page(
        "Pairs of programs that should be the same training",
        "python -m benchmarks.silent_bugs.pairs --out benchmarks/results/compare.md",
        machine(),
        words,
        "| B | other | compare says | right | in words | first operation | seconds |",
        rows,
        [],
    )
    tell(text, given.out)


if __name__ == "__main__":
    main()
