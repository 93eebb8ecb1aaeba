"""Formats what `lockstep verify` has found of configs and of scripts.

The formats are tables, lines that explain, and JSON.

Tests: tests/verify/test_command.py, tests/verify/test_script.py
"""

import json
import shlex
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lockstep.errors import first_line, listed
from lockstep.report.units import columns
from lockstep.strategy import SINGLE
from lockstep.verify import Verdict
from lockstep.verify.comparison_result import ALLOWED, DIFFERENT, EQUAL, NOT_JUDGED, Cause, Outcome
from lockstep.verify.configs import COLUMNS
from lockstep.verify.own_lines import code_at
from lockstep.verify.page import DrawnOutcome
from lockstep.verify.script import signs
from lockstep.verify.script.pairs.losses import PairedLosses
from lockstep.verify.script.task import for_ranks

HEADINGS = ("topology", *COLUMNS, "")
SCRIPT_HEADINGS = ("ranks", *signs.COLUMNS, "")
_MOST_RANKS = 8  # that a line lists


def rows(outcomes: Sequence[Outcome], *, of_script: bool) -> list[Sequence[str]]:
    """Return the rows of a table, below its headings."""
    return [(_title(o, of_script), *o.signs.values(), o.result) for o in outcomes]


def _title(outcome: Outcome, of_script: bool) -> str:
    if of_script:
        return str(outcome.ranks)
    return "single, again" if outcome.name == SINGLE else outcome.name


def drawn(outcomes: Sequence[Outcome], *, of_script: bool) -> list[DrawnOutcome]:
    """Return outcomes with the lines that the page shows of them."""
    drawn_outcomes = []
    for outcome in outcomes:
        if of_script:
            drawn_outcomes.append(
                DrawnOutcome(outcome.name, _script_explanation(outcome)[2:], outcome)
            )
        else:
            drawn_outcomes.append(
                DrawnOutcome(_title(outcome, False), _explanation(outcome)[1:], outcome)
            )
    return drawn_outcomes


def _failure(outcome: Outcome) -> list[str]:
    return [
        "",
        f"{outcome.name}: did not run",
        *(f"  {line}" for line in outcome.failed.splitlines()),
    ]


# ---- configs ----


def config_text(verdict: Verdict) -> str:
    """Format a verdict as a table.

    Each difference follows with its cause, and then the reference's checks.
    """
    how = "every bit" if verdict.exact else "up to the order of summation"
    lines = [
        f"{verdict.steps} steps of {verdict.micro_batches} micro-batches, compared with one"
        f" process, {how}"
    ]
    lines += verdict.notices
    lines += ["", *columns([HEADINGS, *rows(verdict.outcomes, of_script=False)])]
    for outcome in verdict.outcomes:
        lines += _explanation(outcome)
    if verdict.checks:
        lines += ["", "the reference itself"]
    for check in verdict.checks:
        sign = NOT_JUDGED if check.text else EQUAL
        if not check.passed:
            sign = DIFFERENT
        lines += [f"  {sign} {check.name}", *(f"      {line}" for line in check.text.splitlines())]
    return "\n".join(lines)


def _explanation(outcome: Outcome) -> list[str]:
    if outcome.failed:
        return _failure(outcome)
    if outcome.first is None:
        return []
    lines = ["", f"{outcome.name}: step {outcome.first.step + 1}, {_first_difference(outcome)}"]
    for cause in outcome.causes:
        lines += [
            f"  cause: {cause.kind}: {cause.text}",
            f"  found by: {', '.join(cause.found_by)}",
        ]
    return lines


def _first_difference(outcome: Outcome) -> str:
    """Return what differs first, by how much, and on which ranks."""
    first = outcome.first
    assert first is not None
    where = ""
    if first.ranks:
        shown = ", ".join(map(str, first.ranks[:_MOST_RANKS])) + (
            " …" if len(first.ranks) > _MOST_RANKS else ""
        )
        where = f" on rank{'s' if len(first.ranks) > 1 else ''} {shown}"
    if first.aspect in ("loss", "norm"):
        return f"{first.aspect} {first.name}{where}"
    if first.aspect in ("samples", "optimizer"):
        return f"{first.aspect}: {first.name}{where}"
    kind = "first value" if first.aspect == "start" else first.aspect
    others = f" (and of {outcome.alike} more)" if outcome.alike else ""
    if first.missing:
        return f"{kind} of {first.name}: there is none on one side{where}{others}"
    return f"{kind} of {first.name} differs by {first.relative:.1e} of its norm{where}{others}"


def config_json(verdict: Verdict) -> str:
    """Format a verdict as JSON."""
    result = {
        "passed": verdict.passed,
        "steps": verdict.steps,
        "micro_batches": verdict.micro_batches,
        "every_bit": verdict.exact,
        "notices": verdict.notices,
        "topologies": [
            {"topology": outcome.name, **_as_json(outcome)} for outcome in verdict.outcomes
        ],
        "checks": [
            {**vars(check), "relative": _finite(check.relative)} for check in verdict.checks
        ],
    }
    return json.dumps(result, indent=2)


# ---- scripts ----


def script_text(script: str, outcomes: Sequence[Outcome]) -> str:
    """Format outcomes as a table, followed by each difference with its cause."""
    steps = max(outcome.steps for outcome in outcomes)
    of = f"{steps} step{'s' * (steps != 1)} of {as_run(script, outcomes)}"
    lines = [f"{of}, compared with one process that is given the same samples", ""]
    lines += columns([SCRIPT_HEADINGS, *rows(outcomes, of_script=True)])
    for outcome in outcomes:
        lines += _script_explanation(outcome)
    return "\n".join(lines)


def as_run(script: str, outcomes: Sequence[Outcome]) -> str:
    """Return a script, or a command with the numbers of ranks in place of its `{n}`."""
    if len(script.split()) == 1:
        return script
    words = [shlex.split(for_ranks(script, outcome.ranks)) for outcome in outcomes]
    return " and ".join(shlex.join(command) for command in words)


def _script_explanation(outcome: Outcome) -> list[str]:
    """Return the lines on a script: notices, the first difference, each cause."""
    if outcome.failed:
        others = [cause for cause in outcome.causes if first_line(cause.text) not in outcome.failed]
        return [*_failure(outcome), *(line for cause in others for line in _script_cause(cause))]
    lines = [f"  {notice}" for notice in outcome.notices]
    if outcome.not_judged:
        lines.append(f"  cannot judge gradients and weights: {outcome.not_judged}")
    first = outcome.first
    if first is not None:
        # Where rank 0 differs, all ranks do most often.
        rank = f" on rank {first.ranks[0]}" if first.ranks[0] else ""
        if first.aspect == "optimizer":
            differing = f"{first.aspect}: {first.name}"
        else:
            name = f" of {first.name}" if first.name else ""
            differing = f"{first.aspect}{name} differ by {first.relative:.1e} of their norm"
        lines.append(f"  step {first.step + 1}: {differing}{rank}")
        if outcome.operation:
            lines.append(f"    {outcome.operation}")
    for cause in outcome.causes:
        lines += _script_cause(cause)
    return ["", outcome.name, *lines] if lines else []


def _script_cause(cause: Cause) -> list[str]:
    sign = DIFFERENT if cause.is_error else ALLOWED
    lines = [f"  {sign} {cause.kind}: {cause.text}"]
    if cause.line:
        code = code_at(cause.line)
        lines.append(f"      at: {cause.line}" + (f": {code}" if code else ""))
    lines.append(f"      found by: {', '.join(cause.found_by)}")
    return [*lines, f"      do: {cause.fix}"] if cause.fix else lines


def script_json(script: str, outcomes: Sequence[Outcome]) -> str:
    """Format outcomes as JSON."""
    passed = all(outcome.passed for outcome in outcomes)
    worlds = [_as_json(outcome) for outcome in outcomes]
    shown = as_run(script, outcomes)
    return json.dumps({"script": shown, "passed": passed, "worlds": worlds}, indent=2)


# ---- pairs ----


def pair_text(names: tuple[str, str], outcome: Outcome) -> str:
    """Format how two scripts or configs compare, which are called A and B."""
    lines = [f"A: {names[0]}", f"B: {names[1]}", ""]
    row = [str(outcome.steps), *outcome.signs.values(), outcome.result]
    lines += columns([("steps", *outcome.signs, ""), row])
    return "\n".join([*lines, *_script_explanation(outcome)])


def pair_json(names: tuple[str, str], outcome: Outcome) -> str:
    """Format how two scripts or configs compare as JSON."""
    return json.dumps({"a": names[0], "b": names[1], **_as_json(outcome)}, indent=2)


def losses_text(names: tuple[str, str], losses: PairedLosses, given: Sequence[str]) -> str:
    """Format the paired difference of two runs' losses."""
    return "\n".join(
        [
            f"A: {names[0]}",
            f"B: {names[1]}",
            "",
            f"loss over {len(losses.b)} steps: A {fmean(losses.a):.6g}, B {fmean(losses.b):.6g}",
            f"B − A, paired: {losses.difference:+.3g} ± {losses.error:.2g} (mean and its standard"
            f" error; unpaired the error is {losses.unpaired_error:.2g})",
            f"  B was given A's {listed(list(given))}" if given else "  B had what A had by itself",
        ]
    )


def losses_json(names: tuple[str, str], losses: PairedLosses, given: Sequence[str]) -> str:
    """Format the paired difference of two runs' losses as JSON."""
    result = {
        "a": names[0],
        "b": names[1],
        "losses_a": losses.a,
        "losses_b": losses.b,
        "difference": losses.difference,
        "standard_error": _finite(losses.error),
        "unpaired_standard_error": _finite(losses.unpaired_error),
        "given": list(given),
    }
    return json.dumps(result, indent=2)


# ---- one outcome, of either ----


def _as_json(outcome: Outcome) -> dict[str, Any]:
    first = None
    if outcome.first is not None:
        first = {
            "step": outcome.first.step + 1,
            "aspect": outcome.first.aspect,
            "name": outcome.first.name,
            "relative": _finite(outcome.first.relative),
            "ranks": outcome.first.ranks,
        }
    return {
        "ranks": outcome.ranks,
        "passed": outcome.passed,
        "steps": outcome.steps,
        "framework": outcome.framework or None,
        "columns": outcome.signs,
        "same_bits": outcome.same_bits,
        "largest_rounding": outcome.rounding,
        "first_difference": first,
        "first_operation": outcome.operation or None,
        "causes": [vars(cause) for cause in outcome.causes],
        "notices": outcome.notices,
        "failed": outcome.failed or None,
        "not_judged": outcome.not_judged or None,
    }


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
