"""Runs `lockstep verify CONFIG …` and `lockstep verify SCRIPT.py …`, and formats verdicts as tables or as JSON."""

import json
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config import load_config, require_runnable
from lockstep.errors import EXIT_DONE, EXIT_FAILED, UsageError
from lockstep.launch.spawn import spawn_again
from lockstep.report.page import require_replaceable
from lockstep.report.units import columns
from lockstep.scratch import temporary
from lockstep.strategy import SINGLE
from lockstep.verify import DEFAULT_STEPS, Outcome, Verdict, require_startable, verify
from lockstep.verify.page import DrawnOutcome, PartDifference, write_page
from lockstep.verify.script.comparison import ROUNDING
from lockstep.verify.script.judge import judge_script
from lockstep.verify.script.outcome import COLUMNS, ScriptOutcome
from lockstep.verify.script.record import ScriptTask
from lockstep.verify.script.runs import Runs, script_starter, start_command

_DEFAULT_STEPS_OF_SCRIPT = 3
_ASPECTS = ("samples", "loss", "norm", "gradient", "value", "buffer")
_HEADINGS = ("topology", "samples", "loss", "norm", "gradients", "values", "buffers", "")
_SCRIPT_HEADINGS = ("ranks", *COLUMNS, "")


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run(
    path: str | Path,
    overrides: Sequence[str],
    *,
    against: str | None,
    steps: int | None,
    in_json: bool,
    page: Path | None = None,
) -> int:
    """Verify what a config trains; return 0 if all topologies take the same steps, else 1."""
    if page is not None:
        require_replaceable(page)  # before minutes of work
    config = load_config(path, overrides)
    require_runnable(config)
    topologies = (
        None if against is None else [part.strip() for part in against.split(",") if part.strip()]
    )
    # Only here: a script that calls `verify` may read its rank's variables when it is imported,
    # which a fork inherits.
    needed = ["torch.distributed.pipelining", "lockstep.verify.worker"]
    needed += ["lockstep.models.hf"] if (config.model.name or "").startswith("hf:") else []
    start = partial(spawn_again, preload=needed)
    verdict = verify(
        config,
        topologies,
        steps=DEFAULT_STEPS if steps is None else steps,
        start=start,
        report=_report,
    )
    print(json.dumps(_as_json(verdict), indent=2) if in_json else _text(verdict))
    if page is not None:
        drawn = [_drawn(outcome) for outcome in verdict.outcomes]
        write_page(
            page,
            f"verify {path}",
            _HEADINGS,
            [_row(outcome) for outcome in verdict.outcomes],
            drawn,
        )
    return EXIT_DONE if verdict.passed else EXIT_FAILED


def _text(verdict: Verdict) -> str:
    how = "every bit" if verdict.exact else "up to the order of summation"
    lines = [
        f"{verdict.steps} steps of {verdict.micro_batches} micro-batches, compared with one"
        f" process, {how}"
    ]
    lines += verdict.notices
    lines += ["", *columns([_HEADINGS, *(_row(outcome) for outcome in verdict.outcomes)])]
    for outcome in verdict.outcomes:
        lines += _explanation(outcome)
    if verdict.checks:
        lines += ["", "the reference itself"]
    for check in verdict.checks:
        mark = "✗" if not check.passed else "?" if check.text else "✓"
        lines += [f"  {mark} {check.name}", *(f"      {line}" for line in check.text.splitlines())]
    return "\n".join(lines)


def _row(outcome: Outcome) -> Sequence[str]:
    name = _name(outcome)
    if outcome.failed is not None:
        return (name, *("-" for _ in _ASPECTS), "✗ did not run")
    cells = []
    for aspect in _ASPECTS:
        aspects = ("start", "optimizer", aspect) if aspect == "value" else (aspect,)
        fine = not any(result.has(*aspects) for result in outcome.steps)
        cells.append("✓" if fine else ("≈" if outcome.passed else "✗"))
    if outcome.cause is not None and not outcome.cause.is_judged:
        result = "? cannot judge"
    elif not outcome.passed:
        result = "✗"
    elif outcome.same_bits:
        result = "✓ the same bits"
    else:
        result = f"✓ {outcome.largest_rounding:.0e}" if outcome.first is None else "✓ rounding"
    return (name, *cells, result)


def _name(outcome: Outcome) -> str:
    return "single, again" if outcome.topology == SINGLE else outcome.topology


def _explanation(outcome: Outcome) -> list[str]:
    if outcome.failed is not None:
        return [
            "",
            f"{outcome.topology}: did not run",
            *(f"  {line}" for line in outcome.failed.splitlines()),
        ]
    if outcome.first is None:
        return []
    step, first = outcome.first
    shown = ", ".join(map(str, first.ranks[:8])) + (" …" if len(first.ranks) > 8 else "")
    where = "" if not first.ranks else f" on rank{'s' if len(first.ranks) > 1 else ''} {shown}"
    if first.aspect in ("loss", "norm"):
        what = f"{first.aspect} {first.name}{where}"
    elif first.aspect in ("samples", "optimizer"):
        what = f"{first.aspect}: {first.name}{where}"
    else:
        kind = "first value" if first.aspect == "start" else first.aspect
        how = (
            "there is none on one side"
            if first.missing
            else f"differs by {first.relative:.1e} of its norm"
        )
        result = next(result for result in outcome.steps if result.step == step)
        others = sum(d.aspect == first.aspect for d in result.differences) - 1
        more = f" (and of {others} more)" if others else ""
        what = f"{kind} of {first.name}{':' if first.missing else ''} {how}{where}{more}"
    lines = ["", f"{outcome.topology}: step {step + 1}, {what}"]
    if outcome.cause is not None:
        lines.append(f"  cause: {outcome.cause.kind}: {outcome.cause.text}")
        lines.append(f"  found by: {', '.join(outcome.cause.found_by)}")
    return lines


def _drawn(outcome: Outcome) -> DrawnOutcome:
    result = next((result for result in outcome.steps if result.first is not None), None)
    differences = []
    for d in [] if outcome.passed else outcome.deviations:
        text = f"{d.stage}: {d.what} {d.relation} on rank {d.rank}"
        differences.append(
            PartDifference(d.module, text + f" ({d.note})" * bool(d.note), d.relative)
        )
    if not differences and result is not None and not outcome.passed:
        named = [d for d in result.differences if d.name in result.fingerprints]
        differences = [
            PartDifference(d.name, f"{d.aspect} differs by {d.relative:.1e}", d.relative)
            for d in named
        ]
    parameters = [] if result is None else list(result.fingerprints)
    return DrawnOutcome(
        _name(outcome), outcome.passed, _explanation(outcome)[1:], parameters, differences
    )


def _as_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "passed": verdict.passed,
        "steps": verdict.steps,
        "micro_batches": verdict.micro_batches,
        "every_bit": verdict.exact,
        "notices": verdict.notices,
        "topologies": [
            {
                "topology": outcome.topology,
                "passed": outcome.passed,
                "same_bits": outcome.failed is None and outcome.same_bits,
                "largest_rounding": outcome.largest_rounding,
                "failed": outcome.failed,
                "first_difference": _first_as_json(outcome),
                "cause": None if outcome.cause is None else vars(outcome.cause),
            }
            for outcome in verdict.outcomes
        ],
        "checks": [
            {**vars(check), "relative": _finite(check.relative)} for check in verdict.checks
        ],
    }


def _first_as_json(outcome: Outcome) -> dict[str, Any] | None:
    if outcome.first is None:
        return None
    step, first = outcome.first
    found = {
        "step": step + 1,
        "what": first.aspect,
        "name": first.name,
        "relative": _finite(first.relative),
    }
    return found | {"ranks": first.ranks}


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


# ---- scripts ----


def run_script(
    script: str,
    arguments: Sequence[str],
    *,
    ranks: str | None,
    steps: int | None,
    in_json: bool,
    page: Path | None = None,
) -> int:
    """Verify a training script; return 0 if the ranks train what one process trains, else 1.

    `arguments` are those of the script, in which `{n}` stands for the number of ranks; `ranks` is
    written as `2,4`.
    """
    if page is not None:
        require_replaceable(page)
    words = [word.strip() for word in (ranks or "2").split(",") if word.strip()]
    if not words or not all(word.isdecimal() and int(word) for word in words):
        fix = (
            "write --nproc-per-node 1,2,4; topologies such as ddp:2 are for configs, a script"
            " chooses its own"
        )
        raise UsageError(f"{ranks!r} is not a list of numbers of ranks", fix=fix)
    numbers = sorted({int(word) for word in words} - {1})
    if not numbers:
        raise UsageError(
            "one process is what others are compared with", fix="write --nproc-per-node 1,2"
        )
    outcomes = verify_script(
        script, arguments, numbers, steps=_DEFAULT_STEPS_OF_SCRIPT if steps is None else steps
    )
    passed = all(outcome.passed for outcome in outcomes)
    if in_json:
        worlds = [_script_as_json(outcome) for outcome in outcomes]
        print(json.dumps({"script": script, "passed": passed, "worlds": worlds}, indent=2))
    else:
        print(script_text(script, outcomes))
    if page is not None:
        drawn = [_script_drawn(outcome) for outcome in outcomes]
        write_page(
            page,
            f"verify {script}",
            _SCRIPT_HEADINGS,
            [_script_row(outcome) for outcome in outcomes],
            drawn,
        )
    return EXIT_DONE if passed else EXIT_FAILED


def verify_script(
    script: str, arguments: Sequence[str], ranks: Sequence[int], *, steps: int
) -> list[ScriptOutcome]:
    """Compare a script, or a command in which `{n}` stands for the number of ranks, with one process."""
    is_command = len(script.split()) > 1
    if is_command and not re.search(r"\{(\d+/)?n\}", script):
        raise UsageError(
            f"the command {script!r} has no {{n}}, which stands for the number of ranks",
            fix=(
                'write it, as in lockstep verify "torchrun --nproc-per-node {n} train.py"'
                " --ranks 1,2"
            ),
        )
    if not is_command and not Path(script).is_file():
        raise UsageError(f"there is no script {script}", fix="name a Python file that trains")
    require_startable(steps)
    outcomes = []
    for number in ranks:
        with temporary("verify-script") as folder:
            task = ScriptTask(script, () if is_command else tuple(arguments), steps, folder)
            start = start_command if is_command else script_starter(script)
            outcomes.append(judge_script(Runs(task, start, _report), number))
    return outcomes


def script_text(script: str, outcomes: Sequence[ScriptOutcome]) -> str:
    """Format outcomes as a table, followed by each difference with its cause."""
    steps = max(outcome.steps for outcome in outcomes)
    of = f"{steps} step{'s' * (steps != 1)} of {script}"
    lines = [f"{of}, compared with one process that is given the same samples", ""]
    lines += columns([_SCRIPT_HEADINGS, *(_script_row(outcome) for outcome in outcomes)])
    for outcome in outcomes:
        lines += _script_explanation(outcome)
    return "\n".join(lines)


def _script_row(outcome: ScriptOutcome) -> Sequence[str]:
    marks = [outcome.mark(column) for column in COLUMNS]
    if outcome.failed:
        result = "✗ did not run"
    elif outcome.passed:
        other = any(found.is_error is False and found.kind != "samples" for found in outcome.causes)
        result = "✓ but for what is other by nature" if other else f"✓ {outcome.rounding:.0e}"
    else:
        result = "✗" if any(found.is_error for found in outcome.causes) else "? cannot judge"
    return (str(outcome.ranks), *marks, result)


def _script_explanation(outcome: ScriptOutcome) -> list[str]:
    if outcome.failed:
        return [
            "",
            f"{outcome.ranks} ranks: did not run",
            *(f"  {line}" for line in outcome.failed.splitlines()),
        ]
    lines = ["", f"{outcome.ranks} ranks", *(f"  {notice}" for notice in outcome.notices)]
    if outcome.not_judged:
        lines.append(f"  cannot judge gradients and weights: {outcome.not_judged}")
    if (first := outcome.first) is not None:
        name = f" of {first.name}" if first.name else ""
        rank = f" on rank {first.rank}" if first.rank else ""
        size = f"{first.relative:.1e} of their norm"
        lines.append(f"  step {first.step + 1}: {first.aspect}{name} differ by {size}{rank}")
    for found in outcome.causes:
        lines += [
            f"  {'✗' if found.is_error else '≈'} {found.kind}: {found.text}",
            f"      found by: {found.found_by}",
        ]
        lines += [f"      do: {found.fix}"] * bool(found.fix)
    return lines if len(lines) > 2 else []


def _script_drawn(outcome: ScriptOutcome) -> DrawnOutcome:
    modules = dict.fromkeys(found.module for found in outcome.causes if found.module)
    text = "its output differs, and that of modules before it does not"
    differences = [
        PartDifference("" if name == "the model" else name, text, 1.0) for name in modules
    ]
    first = outcome.first.name if outcome.first is not None else ""
    sized = sorted(
        ((n, off) for n, off in outcome.parts.items() if off > ROUNDING),
        key=lambda part: part[0] != first,
    )
    differences += [
        PartDifference(name, f"gradient differs by {off:.1e}", off) for name, off in sized
    ]
    lines = _script_explanation(outcome)[2:]
    return DrawnOutcome(
        f"{outcome.ranks} ranks", outcome.passed, lines, list(outcome.parts), differences
    )


def _script_as_json(outcome: ScriptOutcome) -> dict[str, Any]:
    first = None
    if outcome.first is not None:
        changed = {"step": outcome.first.step + 1, "relative": _finite(outcome.first.relative)}
        first = {**vars(outcome.first), **changed}
    return {
        "ranks": outcome.ranks,
        "passed": outcome.passed,
        "steps": outcome.steps,
        "framework": outcome.framework,
        "columns": {column: outcome.mark(column) for column in COLUMNS},
        "largest_rounding": outcome.rounding,
        "first_difference": first,
        "causes": [vars(found) for found in outcome.causes],
        "notices": outcome.notices,
        "failed": outcome.failed or None,
        "not_judged": outcome.not_judged or None,
    }
