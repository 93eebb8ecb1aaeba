"""Runs `lockstep verify SCRIPT.py …`, and formats its verdict as a table or as JSON."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.environment import rank_facts
from lockstep.errors import EXIT_DONE, EXIT_FAILED, UsageError
from lockstep.report.units import columns
from lockstep.scratch import temporary
from lockstep.verify.page import DrawnOutcome, PartDifference, write_page
from lockstep.verify.script.comparison import ROUNDING
from lockstep.verify.script.judge import judge_script
from lockstep.verify.script.outcome import COLUMNS, ScriptCause, ScriptOutcome
from lockstep.verify.script.runs import CommandRuns, ScriptRuns

DEFAULT_STEPS = 3
_HEADINGS = ("ranks", *COLUMNS, "")


def run(
    script: str, arguments: Sequence[str], *, ranks: str | None, steps: int | None, in_json: bool,
    page: Path | None = None,
) -> int:  # fmt: skip
    """Verify a training script; return 0 if the ranks train what one process trains, else 1.

    `arguments` are those of the script, in which `{n}` stands for the number of ranks; `ranks` is written as `2,4`.
    """
    outcomes = verify_script(script, arguments, _numbers(ranks), steps=DEFAULT_STEPS if steps is None else steps)
    print(json.dumps(as_json(script, outcomes), indent=2) if in_json else text(script, outcomes))
    if page is not None:
        rows = [_row(outcome) for outcome in outcomes]
        write_page(page, f"verify {script}", _HEADINGS, rows, [drawn(outcome) for outcome in outcomes])
    return EXIT_DONE if all(outcome.passed for outcome in outcomes) else EXIT_FAILED


def verify_script(script: str, arguments: Sequence[str], ranks: Sequence[int], *, steps: int) -> list[ScriptOutcome]:
    """Compare a script, or a command in which `{n}` stands for the number of ranks, with one process."""
    is_command = len(script.split()) > 1
    if is_command and not re.search(r"\{(\d+/)?n\}", script):
        raise UsageError(
            f"the command {script!r} has no {{n}}, which stands for the number of ranks",
            fix='write it, as in lockstep verify "torchrun --nproc-per-node {n} train.py" --ranks 1,2',
        )
    if not is_command and not Path(script).is_file():
        raise UsageError(f"there is no script {script}", fix="name a Python file that trains")
    if steps < 1:
        raise UsageError(f"--steps {steps} compares nothing", fix="write a number from 1 on")
    if rank_facts().world_size > 1:
        raise UsageError("verify starts its own ranks, and is a rank itself", fix="start it without a launcher")

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    outcomes = []
    for number in ranks:
        with temporary("verify-script") as folder:
            runs = (
                CommandRuns(script, steps, folder, report)
                if is_command
                else ScriptRuns(script, arguments, steps, folder, report)
            )
            outcomes.append(judge_script(runs, number))
    return outcomes


def _numbers(given: str | None) -> list[int]:
    words = [word.strip() for word in (given or "2").split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise UsageError(
            f"{given!r} is not a list of numbers of ranks",
            fix="write --nproc-per-node 1,2,4; topologies such as ddp:2 are for configs, a script chooses its own",
        )
    numbers = sorted({int(word) for word in words} - {1})
    if not numbers:
        raise UsageError("one process is what others are compared with", fix="write --nproc-per-node 1,2")
    return numbers


def text(script: str, outcomes: Sequence[ScriptOutcome]) -> str:
    """Format outcomes as a table, followed by each difference with its cause."""
    steps = max(outcome.steps for outcome in outcomes)
    lines = [
        f"{steps} step{'s' * (steps != 1)} of {script}, compared with one process that is given the same samples",
        "",
    ]
    lines += columns([_HEADINGS, *(_row(outcome) for outcome in outcomes)])
    for outcome in outcomes:
        lines += _explanation(outcome)
    return "\n".join(lines)


def _row(outcome: ScriptOutcome) -> Sequence[str]:
    marks = [outcome.mark(column) for column in COLUMNS]
    if outcome.failed:
        result = "✗ did not run"
    elif outcome.passed:
        other = any(found.is_error is False and found.kind != "samples" for found in outcome.causes)
        result = "✓ but for what is other by nature" if other else f"✓ {outcome.rounding:.0e}"
    else:
        result = "✗" if any(found.is_error for found in outcome.causes) else "? cannot judge"
    return (str(outcome.ranks), *marks, result)


def _explanation(outcome: ScriptOutcome) -> list[str]:
    if outcome.failed:
        return ["", f"{outcome.ranks} ranks: did not run", *(f"  {line}" for line in outcome.failed.splitlines())]
    lines = ["", f"{outcome.ranks} ranks", *(f"  {notice}" for notice in outcome.notices)]
    if outcome.not_judged:
        lines.append(f"  cannot judge gradients and weights: {outcome.not_judged}")
    if (first := outcome.first) is not None:
        name = f" of {first.name}" if first.name else ""
        rank = f" on rank {first.rank}" if first.rank else ""
        lines.append(
            f"  step {first.step + 1}: {first.aspect}{name} differ by {first.relative:.1e} of their norm{rank}"
        )
    for found in outcome.causes:
        lines += _cause(found)
    return lines if len(lines) > 2 else []


def _cause(found: ScriptCause) -> list[str]:
    lines = [f"  {'✗' if found.is_error else '≈'} {found.kind}: {found.text}", f"      found by: {found.found_by}"]
    return lines + [f"      do: {found.fix}"] * bool(found.fix)


def drawn(outcome: ScriptOutcome) -> DrawnOutcome:
    """Return what the page shows of one number of ranks."""
    first = outcome.first
    modules = dict.fromkeys(found.module for found in outcome.causes if found.module)
    differences = [
        PartDifference(
            "" if name == "the model" else name, "its output differs, and that of modules before it does not", 1.0
        )
        for name in modules
    ]
    sized = sorted(outcome.parts.items(), key=lambda part: part[0] != (first.name if first is not None else ""))
    differences += [
        PartDifference(name, f"gradient differs by {off:.1e}", off) for name, off in sized if off > ROUNDING
    ]
    lines = _explanation(outcome)[2:]
    return DrawnOutcome(f"{outcome.ranks} ranks", outcome.passed, lines, list(outcome.parts), differences)


def as_json(script: str, outcomes: Sequence[ScriptOutcome]) -> dict[str, Any]:
    """Return outcomes as JSON data."""
    return {
        "script": script,
        "passed": all(outcome.passed for outcome in outcomes),
        "worlds": [
            {
                "ranks": outcome.ranks,
                "passed": outcome.passed,
                "steps": outcome.steps,
                "framework": outcome.framework,
                "columns": {column: outcome.mark(column) for column in COLUMNS},
                "largest_rounding": outcome.rounding,
                "first_difference": None if outcome.first is None else _difference(outcome),
                "causes": [vars(found) for found in outcome.causes],
                "notices": outcome.notices,
                "failed": outcome.failed or None,
                "not_judged": outcome.not_judged or None,
            }
            for outcome in outcomes
        ],
    }


def _difference(outcome: ScriptOutcome) -> dict[str, Any]:
    assert outcome.first is not None
    size = outcome.first.relative
    found = {**vars(outcome.first), "step": outcome.first.step + 1}
    return found | {"relative": size if size < float("inf") else None}
