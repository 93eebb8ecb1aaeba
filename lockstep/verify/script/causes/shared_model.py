"""Names why ranks that share one model, as stages or cut layers, have another gradient.

None of them has a gradient of its own samples: all compute the same. So their outputs, losses and
gradients are compared with those of one process, module by module and parameter by parameter.

Tests: tests/verify/test_script.py, tests/verify/test_values_of_ranks.py
"""

from dataclasses import replace

import numpy as np

from lockstep.errors import listed
from lockstep.verify.algebra import ADDS_UP, distance, factor
from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.causes.evidence import GradientEvidence
from lockstep.verify.script.causes.fixes import script_cause
from lockstep.verify.script.causes.gradients import COMPUTATION, NOT_SYNCHRONISED, SUM
from lockstep.verify.script.comparison import ROUNDING, ScriptComparison
from lockstep.verify.script.flows import first_output_of_all
from lockstep.verify.script.observed.traced_operations import FORWARD
from lockstep.verify.script.record import ScriptRecord
from lockstep.verify.script.vectors import floor_of, is_same, is_wrong


def shared_model_cause(
    comparison: ScriptComparison, number: int, evidence: GradientEvidence, reference: ScriptRecord
) -> Cause | None:
    """Return why ranks that share one model have another gradient in a step than one process."""
    return (
        _output_cause(comparison, number, reference)
        or shared_gradient_cause(evidence)
        or _stage_cause(comparison)
        or _loss_cause(comparison, number, reference)
    )


def _output_cause(
    comparison: ScriptComparison, number: int, reference: ScriptRecord
) -> Cause | None:
    """Return the cause if ranks that cut layers have another output of a module than one process.

    Only outputs that all of them have alike are compared, as those that they have added up.
    """
    if len(comparison.world.units) > 1 or comparison.ranks == 1:
        return None
    right, *ranks = [record.steps[number].flow for record in (reference, *comparison.records)]
    module = first_output_of_all(ranks, right)
    if module is None:
        return None
    text = (
        f"ranks that share the model have another output of {module or 'the model'} than one"
        " process with the same samples, and all of them the same"
    )
    by = "the outputs of each module, on the ranks and in one process"
    cause = script_cause(COMPUTATION, text, by, comparison.outcome.framework)
    cause.place_at(_last_line_of(comparison, number, module))
    return replace(cause, module=module or "the model")


def _last_line_of(comparison: ScriptComparison, number: int, module: str) -> str:
    """Return the user's own line of a module's last operation in a traced step; or empty."""
    operations = comparison.traced[0].steps[number].operations if comparison.traced else []
    lines = [each.own for each in operations if each.module == module and each.phase == FORWARD]
    return next(filter(None, reversed(lines)), "")


def _stage_cause(comparison: ScriptComparison) -> Cause | None:
    """Return the cause if a rank with a part of the layers computes otherwise than one process."""
    if comparison.differing is None or len(comparison.world.units) > 1:
        return None
    text = (
        f"rank {comparison.rank_that_differs} computes its layers with other values than one"
        f" process that has all layers and the same samples: {comparison.differing.text}"
    )
    by = "each operation of the ranks' layers, and of one process"
    return script_cause(COMPUTATION, text, by, comparison.outcome.framework)


def _loss_cause(comparison: ScriptComparison, number: int, reference: ScriptRecord) -> Cause | None:
    """Return the cause if ranks that share the model compute another loss than one process.

    A rank that computes a part of the loss, as of its part of a sequence, has one that adds up.
    """
    if len(comparison.world.units) > 1 or comparison.ranks == 1:
        return None
    right = sum(reference.steps[number].losses)
    ranks = [sum(record.steps[number].losses) for record in comparison.records]
    is_seen = all(ranks) and bool(right)
    parts = (sum(ranks), sum(ranks) / comparison.ranks, *ranks)
    if not is_seen or any(abs(part - right) <= ROUNDING * abs(right) for part in parts):
        return None
    losses = listed([f"{loss:.6g}" for loss in ranks])
    text = (
        f"ranks that share the model have the losses {losses}, and one process with the same"
        f" samples has {right:.6g}"
    )
    by = "what each backward pass starts from, on the ranks and in one process"
    cause = script_cause(COMPUTATION, text, by, comparison.outcome.framework)
    cause.place_at(comparison.traced[0].steps[number].loss_line if comparison.traced else "")
    return cause


def shared_gradient_cause(evidence: GradientEvidence) -> Cause | None:
    """Return how gradients of ranks that share a model come from those of one process.

    They are compared parameter by parameter.
    """
    floor = floor_of(evidence.reference)
    partial: list[str] = []  # names of parameters whose gradients add up to that of one process
    scaled: dict[str, list[str]] = {}  # what they are → names of parameters
    apart: list[str] = []  # names of those that differ from rank to rank
    for name, part in evidence.slices.items():
        right = evidence.reference[part]
        ranks = [gradient[part] for gradient in evidence.ranks]
        wrong = [rank for rank, gradient in enumerate(ranks) if is_wrong(gradient, right, floor)]
        if not wrong:
            continue
        times = [factor(gradient, right) for gradient in ranks]
        alike = all(is_same(gradient, ranks[0]) for gradient in ranks[1:])
        # Parts that come through different layers are not alike: halves that are, are scaled.
        if not alike and is_same(sum(ranks, np.zeros_like(right)), right):
            partial.append(name)
        elif all(distance(one, k * right) <= ADDS_UP for one, k in zip(ranks, times, strict=True)):
            where = "" if len(wrong) == len(ranks) else f" on rank {listed(list(map(str, wrong)))}"
            scaled.setdefault(f"{times[wrong[0]]:.3g} × that of one process{where}", []).append(
                name
            )
        elif not alike:
            apart.append(name)
    by = "the gradients of ranks and of one process"
    if partial:
        text = (
            f"the gradient of {listed(partial, 5)} is not summed over the ranks that share the"
            " model: each has the part that comes through its own part of the layers"
        )
        return script_cause(NOT_SYNCHRONISED, text, by, evidence.framework, parameters=partial)
    if scaled:
        text = "; ".join(
            f"the gradient of {listed(names, 5)} is {what}" for what, names in scaled.items()
        )
        return script_cause(SUM, text, by, evidence.framework)
    if apart:
        text = (
            f"the gradient of {listed(apart, 5)}, which all ranks hold whole, differs from rank to"
            " rank"
        )
        return script_cause(NOT_SYNCHRONISED, text, by, evidence.framework, parameters=apart)
    return None
