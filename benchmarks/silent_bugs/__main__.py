"""Judges planted faults and sound models with `lockstep verify`, and writes the table.

python -m benchmarks.silent_bugs [--only NAME …] [--out benchmarks/results/silent_bugs.md]
"""

import argparse
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.page import machine, page, table, tell
from benchmarks.silent_bugs.faults import FAULTS, SOUND, Fault, hugging_face
from benchmarks.silent_bugs.faults.first_try import (
    FIRST_TRY,
    MISSED,
    PASSED,
    RIGHT,
    ROUNDS,
    UNKNOWN,
    WRONG,
)
from lockstep.config import config_from
from lockstep.errors import LockstepError
from lockstep.launch.spawn import spawn_again
from lockstep.verify import Verdict, verify

COMMON = {
    "training.batch_size": 2,
    "training.global_batch_size": 8,
    "training.learning_rate": 3e-3,
    "training.warmup_steps": 0,
    "training.max_steps": 20,
    "precision.mode": "fp32",
}
_PRELOAD = ["torch.distributed.pipelining", "lockstep.verify.worker", hugging_face.__name__]
SECONDS = 15  # goal, for one verdict
_MARK = {True: "✓", False: "✗"}


@dataclass
class Judged:
    """One row.

    Attributes:
        found: whether the verdict is not "passed".
        kind, text: of the cause.
        right: whether the cause is the planted one.
        unknown: whether no cause was named.
        seconds: for the verdict.
    """

    name: str
    found: bool
    kind: str
    text: str
    right: bool
    unknown: bool
    seconds: float


def judge(fault: Fault) -> Judged:
    """Verify one, and look whether its cause was named."""
    began = time.monotonic()
    config = config_from({**COMMON, **fault.settings})
    start = partial(spawn_again, preload=_PRELOAD)
    try:
        verdict = verify(
            fault.make, [fault.topology], config=config, steps=fault.steps, start=start
        )
        passed = verdict.passed
        kind, text = cause(verdict)
    except LockstepError as error:  # one process alone can't be trained
        passed = False
        kind = "refused"
        text = str(error)
    right = kind in fault.kinds and all(
        any(w.replace("_", " ") in text or w in text for w in words) for words in fault.names
    )
    return Judged(
        fault.make.__name__,
        not passed,
        kind,
        text,
        right,
        kind in ("cause not known", "cannot judge"),
        time.monotonic() - began,
    )


def cause(verdict: Verdict) -> tuple[str, str]:
    """Return the kind and the text of what was found; "" if all passed."""
    for outcome in verdict.outcomes:
        if outcome.failed:
            hangs = outcome.failed.startswith("no answer within")
            refused = "other ranks" not in outcome.failed and (
                "do:" in outcome.failed or "fix:" in outcome.failed
            )
            return "hang" if hangs else "refused" if refused else "crash", outcome.failed
        if outcome.causes and not outcome.passed:
            return outcome.causes[0].kind, outcome.causes[0].text
    for check in verdict.checks:
        if not check.passed:
            return check.kind, check.text
    return "", ""


def row(judged: Judged, *, sound: bool) -> str:
    name = judged.name.replace("_", " ")
    text = " ".join(judged.text.split())[:160].replace("|", "/")
    if sound:
        verdict = "✗ " + judged.kind if judged.found else "passed"
        return (
            f"| {name} | {verdict} | {FIRST_TRY.get(judged.name, 'seen')} | {judged.seconds:.0f} |"
        )
    how = "?" if judged.unknown else _MARK[judged.right]
    first = FIRST_TRY.get(judged.name, "seen")
    return (
        f"| {name} | {_MARK[judged.found]} | {how} | {first} | {judged.kind}: {text} |"
        f" {judged.seconds:.0f} |"
    )


def _first_tries(faults: list[str], sound: list[str]) -> list[str]:
    """Return lines on what verify made of those that it had not seen, for each round of them."""
    lines = []
    for name, tries in ROUNDS.items():
        first = [tries[each] for each in faults if each in tries]
        models = [tries[each] for each in sound if each in tries]
        if first and models:
            lines += [
                (
                    f"At the first try of the {name} round it found"
                    f" {len(first) - first.count(MISSED)} of {len(first)} faults that it had not"
                    f" seen, named {first.count(RIGHT)} causes rightly, {first.count(WRONG)}"
                    f" wrongly or in part and {first.count(UNKNOWN)} not, and passed"
                    f" {models.count(PASSED)} of {len(models)} sound models."
                ),
                "",
            ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = []
    sound = []
    for faults, into in ((FAULTS, found), (SOUND, sound)):
        for fault in faults:
            if given.only is None or fault.make.__name__ in given.only:
                into.append(judge(fault))
                print(row(into[-1], sound=into is sound), flush=True)
    wrong = sum(j.found and not j.right and not j.unknown for j in found)
    seconds = sorted(j.seconds for j in (*found, *sound)) or [0.0]
    late = sum(each > SECONDS for each in seconds)
    right = (
        f"{sum(j.right for j in found)} of {len(found)};"
        f" {sum(j.found and j.unknown for j in found)} not known"
    )
    rows = {
        "55 faults or more, all found": f"{sum(j.found for j in found)} of {len(found)}",
        "50 causes or more right, and 91 % of them": right,
        "no wrong cause": f"{wrong}",
        "23 sound models or more, all pass": f"{sum(not j.found for j in sound)} of {len(sound)}",
        f"a verdict in {SECONDS} s": (
            f"{seconds[len(seconds) // 2]:.0f} s in the middle, {seconds[-1]:.0f} s at most, "
            f"{late} of {len(seconds)} later"
        ),
    }
    text = page(
        "Silent bugs",
        "python -m benchmarks.silent_bugs --out benchmarks/results/silent_bugs.md",
        machine(),
        [
            *table("| goal | shown |", [f"| {goal} | {shown} |" for goal, shown in rows.items()]),
            "",
            (
                "Each fault is planted in a small model (`faults/`), most on rank 1 of two. Those"
                " whose first try is `seen`"
            ),
            (
                "were written together with verify, as were the kinds and words that count as a"
                " right cause. The others, and"
            ),
            (
                "their causes, were written down before verify was given them; the column says what"
                " it made of them then."
            ),
            (
                "It was mended since, so that it has seen these, too. In seconds, the machine's"
                " load is in it."
            ),
            "",
            *_first_tries([j.name for j in found], [j.name for j in sound]),
        ],
        "| fault | found | cause right | first try | what verify says | seconds |",
        [row(j, sound=False) for j in found],
        [
            "Sound models:",
            "",
            *table(
                "| model | verdict | first try | seconds |", [row(j, sound=True) for j in sound]
            ),
        ],
    )
    tell(text, given.out)


if __name__ == "__main__":
    main()
