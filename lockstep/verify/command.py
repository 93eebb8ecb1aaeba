"""Runs `lockstep verify CONFIG --against …`, and formats its verdict as a table or as JSON."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.config import load_config, require_runnable
from lockstep.errors import EXIT_DONE, EXIT_FAILED
from lockstep.launch.spawn import spawn_again
from lockstep.report.units import columns
from lockstep.strategy import SINGLE
from lockstep.verify import DEFAULT_STEPS, Outcome, Verdict, verify
from lockstep.verify.page import DrawnOutcome, PartDifference, write_page


def run(
    path: str | Path, overrides: Sequence[str], *, against: str | None, steps: int | None, in_json: bool,
    page: Path | None = None,
) -> int:  # fmt: skip
    """Verify what a config trains; return 0 if all topologies take the same steps, else 1."""
    config = load_config(path, overrides)
    require_runnable(config)
    topologies = None if against is None else [part.strip() for part in against.split(",") if part.strip()]

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    # Only here: a script that calls `verify` may read its rank's variables when it is imported, which a fork inherits.
    needed = ["torch.distributed.pipelining", "lockstep.verify.worker"]
    needed += ["lockstep.models.hf"] if (config.model.name or "").startswith("hf:") else []
    start = partial(spawn_again, preload=needed)
    verdict = verify(config, topologies, steps=DEFAULT_STEPS if steps is None else steps, start=start, report=report)
    print(json.dumps(as_json(verdict), indent=2) if in_json else text(verdict))
    if page is not None:
        rows = [_row(outcome) for outcome in verdict.outcomes]
        write_page(page, f"verify {path}", _HEADINGS, rows, [drawn(outcome) for outcome in verdict.outcomes])
    return EXIT_DONE if verdict.passed else EXIT_FAILED


_COLUMNS = ("samples", "loss", "norm", "gradient", "value", "buffer")
_HEADINGS = ("topology", "samples", "loss", "norm", "gradients", "values", "buffers", "")


def text(verdict: Verdict) -> str:
    """Format a verdict as a table, followed by each difference with its cause."""
    how = "every bit" if verdict.exact else "up to the order of summation"
    lines = [f"{verdict.steps} steps of {verdict.micro_batches} micro-batches, compared with one process, {how}"]
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
        return (name, *("-" for _ in _COLUMNS), "✗ did not run")
    cells = []
    for aspect in _COLUMNS:
        aspects = ("start", "optimizer", aspect) if aspect == "value" else (aspect,)
        fine = not any(result.has(*aspects) for result in outcome.steps)
        cells.append("✓" if fine else ("≈" if outcome.passed else "✗"))
    rounding = max((result.rounding for result in outcome.steps), default=0.0)
    if outcome.cause is not None and not outcome.cause.is_judged:
        result = "? cannot judge"
    elif not outcome.passed:
        result = "✗"
    elif all(result.same_bits for result in outcome.steps):
        result = "✓ the same bits"
    else:
        result = f"✓ {rounding:.0e}" if outcome.first is None else "✓ rounding"
    return (name, *cells, result)


def _explanation(outcome: Outcome) -> list[str]:
    if outcome.failed is not None:
        return ["", f"{outcome.topology}: did not run", *(f"  {line}" for line in outcome.failed.splitlines())]
    if outcome.first is None:
        return []
    step, _ = outcome.first
    lines = ["", f"{outcome.topology}: step {step + 1}, {_description(outcome)}"]
    if outcome.cause is not None:
        lines.append(f"  cause: {outcome.cause.kind}: {outcome.cause.text}")
        lines.append(f"  found by: {', '.join(outcome.cause.found_by)}")
    return lines


def _description(outcome: Outcome) -> str:
    assert outcome.first is not None
    step, first = outcome.first
    where = "" if not first.ranks else " on rank" + ("s " if len(first.ranks) > 1 else " ") + _joined(first.ranks)
    if first.aspect in ("loss", "norm"):
        return f"{first.aspect} {first.name}{where}"
    if first.aspect in ("samples", "optimizer"):
        return f"{first.aspect}: {first.name}{where}"
    kind = {"start": "first value", "gradient": "gradient", "value": "value", "buffer": "buffer"}[first.aspect]
    result = next(r for r in outcome.steps if r.step == step)
    others = sum(d.aspect == first.aspect for d in result.differences) - 1
    more = f" (and of {others} more)" if others else ""
    if first.missing:
        return f"{kind} of {first.name}: there is none on one side{where}{more}"
    return f"{kind} of {first.name} differs by {first.relative:.1e} of its norm{where}{more}"


def _joined(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")


def drawn(outcome: Outcome) -> DrawnOutcome:
    """Return what the page shows of one topology."""
    result = next((result for result in outcome.steps if result.first is not None), None)
    differences = []
    for d in [] if outcome.passed else outcome.deviations:
        text = f"{d.stage}: {d.what} {d.relation} on rank {d.rank}"
        differences.append(PartDifference(d.module, text + f" ({d.note})" * bool(d.note), d.relative))
    if not differences and result is not None and not outcome.passed:
        differences = [
            PartDifference(d.name, f"{d.aspect} differs by {d.relative:.1e}", d.relative)
            for d in result.differences
            if d.name in result.fingerprints
        ]
    parameters = [] if result is None else list(result.fingerprints)
    lines = _explanation(outcome)[1:]
    return DrawnOutcome(_name(outcome), outcome.passed, lines, parameters, differences)


def _name(outcome: Outcome) -> str:
    return "single, again" if outcome.topology == SINGLE else outcome.topology


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as JSON data."""
    return {
        "passed": verdict.passed,
        "steps": verdict.steps,
        "micro_batches": verdict.micro_batches,
        "every_bit": verdict.exact,
        "notices": verdict.notices,
        "topologies": [_outcome(outcome) for outcome in verdict.outcomes],
        "checks": [{**vars(check), "relative": _finite(check.relative)} for check in verdict.checks],
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    first = None
    if outcome.first is not None:
        step, difference = outcome.first
        first = {
            "step": step + 1,
            "what": difference.aspect,
            "name": difference.name,
            "relative": _finite(difference.relative),
            "ranks": difference.ranks,
        }
    return {
        "topology": outcome.topology,
        "passed": outcome.passed,
        "same_bits": outcome.failed is None and all(result.same_bits for result in outcome.steps),
        "largest_rounding": max((result.rounding for result in outcome.steps), default=0.0),
        "failed": outcome.failed,
        "first_difference": first,
        "cause": None if outcome.cause is None else vars(outcome.cause),
    }


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
