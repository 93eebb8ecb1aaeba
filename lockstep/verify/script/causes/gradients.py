"""Names why ranks of a script compute another gradient than one process, or weigh it otherwise.

Each rank's own gradient, of its samples alone, and that of one process are compared with sums of
the others (`lockstep.verify.algebra`), parameter by parameter. Where ranks compute what they
should, and combine it otherwise, `reduction.py` names the cause.

Tests: tests/verify/test_algebra.py, tests/verify/test_script.py
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lockstep.errors import listed
from lockstep.verify.algebra import ADDS_UP, Values, distance, explaining_weights, factor, mean_of
from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.causes.evidence import GradientEvidence
from lockstep.verify.script.causes.fixes import NORMALISATION, script_cause
from lockstep.verify.script.flows import first_module
from lockstep.verify.script.record import RecordedStep, ScriptRecord
from lockstep.verify.script.vectors import floor_of, is_same, is_wrong

_NEARLY = 0.02  # relative difference up to which a weight is taken for another number
BY_PARTS = "gradients of each rank's samples alone"
COMPUTATION = "computation of a rank"
NOT_SYNCHRONISED = "gradient synchronisation"
SUM = "sum of gradients"


def weighing_cause(evidence: GradientEvidence) -> Cause | None:
    """Return the cause if one process does not take the mean of the ranks' own gradients.

    It weighs them otherwise.
    """
    weights = explaining_weights(evidence.own, evidence.reference)
    if weights is None:
        return None
    ranks = len(evidence.own)
    shares = ", ".join(f"{weight:.3f}" for weight in weights)
    by = (
        f"{BY_PARTS}: their mean is the ranks' gradient; weighed by {shares} they are the gradient"
        " of one process"
    )
    total = float(weights.sum())
    if abs(total - 1) < _NEARLY:
        text = (
            "each rank's loss is a mean over its own targets, and ranks have unequal numbers of"
            f" them: one process weighs the ranks' samples by {shares}, and their average by"
            f" {', '.join([f'{1 / ranks:.3f}'] * ranks)}"
        )
        return script_cause(NORMALISATION, text, by, evidence.framework)
    if max(weights) - min(weights) < _NEARLY * max(weights):
        text = (
            f"the gradient of all parameters is {1 / total:.3g} × that of one process on the same"
            " samples"
        )
        if abs(total - ranks) < _NEARLY * ranks:
            text = (
                f"the gradient is {1 / total:.3g} × that of one process: each rank's loss is a sum"
                f" over its samples, and averaging over ranks divides it by {ranks}"
            )
        return script_cause(SUM, text, by, evidence.framework)
    wrong = [rank for rank, weight in enumerate(weights) if abs(weight * ranks - 1) > _NEARLY]
    if len(wrong) == ranks:
        return None
    times = {rank: 1 / (weights[rank] * ranks) for rank in wrong if weights[rank] > 0}
    text = "; ".join(
        f"rank {rank}'s gradient is {k:.3g} × that of its samples" for rank, k in times.items()
    )
    return script_cause(COMPUTATION, text, by, evidence.framework)


def own_count_cause(evidence: GradientEvidence, alone: Sequence[Values]) -> Cause | None:
    """Return the cause if each rank divides by a count that is not that of the whole batch.

    On its samples one process computes what the rank does, and on all samples it weighs them
    otherwise: two ranks, whose texts are padded to 5 and to 4 words, divide by 5 and 4 a text, and
    one process by 5. It weighs the ranks' samples by 1/2 and 2/5.

    Args:
        evidence: of the step.
        alone: gradients of one process on each unit's samples.
    """
    weights = explaining_weights(evidence.own, evidence.reference)
    pairs = zip(evidence.own, alone, strict=True)
    if weights is None or not all(is_same(mine, right) for mine, right in pairs):
        return None
    ranks = len(evidence.own)
    shares = ", ".join(f"{weight:.3f}" for weight in weights)
    text = (
        "each rank's loss is divided by a count of its own, as by the positions of a batch that is"
        " padded to its longest sample, and one process divides by that of all samples: it weighs"
        f" the ranks' samples by {shares}, and their average by"
        f" {', '.join([f'{1 / ranks:.3f}'] * ranks)}"
    )
    by = (
        f"{BY_PARTS}: one process computes each rank's own, and weighed by {shares} they are its"
        " gradient of all samples"
    )
    return script_cause(NORMALISATION, text, by, evidence.framework)


def shards_cause(
    mine: Values, owner: Values, ranks: int, evidence: GradientEvidence
) -> Cause | None:
    """Return the cause if ranks have multiplied their shards of the gradients by other factors.

    Args:
        mine: the gradients of all shards, as the optimizers use them.
        owner: the rank that holds each element.
        ranks: their number.
        evidence: of the step.
    """
    right = evidence.reference
    factors = []
    for rank in range(ranks):
        at = owner == rank
        times = factor(mine[at], right[at]) if at.any() else 0.0
        if times <= 0 or distance(mine[at], times * right[at]) > ADDS_UP:
            return None
        factors.append(times)
    if max(factors) - min(factors) < _NEARLY * max(factors):
        return None
    each = ", ".join(f"{times:.3g} × on rank {rank}" for rank, times in enumerate(factors))
    text = (
        f"each rank has multiplied its shards of the gradients by a factor of its own ({each}, of"
        " what one process has), as where they are clipped by the norm of these shards alone"
    )
    by = "divided by these factors, the ranks' shards are the gradient of one process"
    return script_cause("clipping", text, by, evidence.framework)


def scaled_cause(evidence: GradientEvidence) -> Cause | None:
    """Return the cause if some parameters' gradients are one multiple of those of one process.

    What ranks exchange in a forward pass may lose gradients of other ranks, so that the mean
    divides what is left by the number of ranks once more; parameters that it does not reach are
    right.
    """
    floor = floor_of(evidence.reference)
    names = []
    factors = []
    for name, at in evidence.slices.items():
        right = evidence.reference[at]
        wrong = [mine[at] for mine in evidence.ranks if is_wrong(mine[at], right, floor)]
        if not wrong:
            continue
        times = factor(wrong[0], right)
        if any(distance(mine, times * right) > ADDS_UP for mine in wrong):
            return None
        names.append(name)
        factors.append(times)
    # A number is a multiple of any other.
    if all(evidence.sizes[name] == 1 for name in names):
        return None
    if max(factors) - min(factors) > _NEARLY * abs(factors[0]):
        return None
    text = f"the gradient of {listed(names, 5)} is {factors[0]:.3g} × that of one process"
    by = f"divided by {factors[0]:.3g}, it is the gradient of one process"
    return script_cause(SUM, text, by, evidence.framework, parameters=names)


def computation_cause(
    evidence: GradientEvidence,
    alone: Sequence[Values],
    ranks: Sequence[ScriptRecord],
    processes: Sequence[ScriptRecord],
    number: int,
) -> Cause | None:
    """Return the cause if a rank computes another gradient from its samples than one process does.

    Args:
        evidence: of the step.
        alone: gradients of one process on each unit's samples.
        ranks: the record of each unit's first rank.
        processes: the records of the processes that computed `alone`.
        number: of the step.
    """
    for rank, (mine, right) in enumerate(zip(evidence.own, alone, strict=True)):
        floor = floor_of(right)
        names = [
            name for name, at in evidence.slices.items() if is_wrong(mine[at], right[at], floor)
        ]
        if not names:
            continue
        module, differs = _where_it_differs(
            ranks[rank].steps[number], processes[rank].steps[number]
        )
        times = factor(mine, right)
        is_multiple = distance(mine, times * right) < ADDS_UP
        # Ranks that exchange tensors in a forward pass compute what one process can't on their
        # samples alone.
        scaled = None if is_multiple else scaled_cause(evidence)
        if scaled is not None:
            return scaled
        size = f"{times:.3g} × " if is_multiple else "other than "
        text = (
            f"rank {rank}'s own gradient of {listed(names, 5)} is {size}that of one process on its"
            f" samples; {differs}"
        )
        by = "one process on each rank's samples alone"
        return replace(script_cause(COMPUTATION, text, by, evidence.framework), module=module)
    return None


def _where_it_differs(step: RecordedStep, right: RecordedStep) -> tuple[str, str]:
    """Return the first module whose output differs, empty if none does, and a clause on it."""
    module = first_module(step.flow, right.flow)
    if module:
        return module, f"the forward pass differs from {module} on"
    if step.losses != right.losses and not np.allclose(step.losses, right.losses, rtol=1e-5):
        return "", "modules return the same, and the loss differs: its targets, weights or scale do"
    return "", (
        "outputs and loss are the same, and the backward pass differs: a hook, or a function of its"
        " own"
    )


def coupling_cause(evidence: GradientEvidence, alone: Sequence[Values]) -> Cause | None:
    """Return the cause if the loss of the whole batch is not the mean of its parts' losses.

    On one process, the mean of the gradients of the ranks' parts is then the ranks' gradient.
    """
    if not all(is_same(gradient, mean_of(alone)) for gradient in evidence.ranks):
        return None
    text = (
        "the loss of the whole batch is not a mean of the losses of its parts: it couples samples"
        " (negatives or a balance over the batch, statistics of the batch), or has terms that are"
        " divided by different counts"
    )
    by = (
        "one process on each rank's samples alone: the mean of these gradients is the ranks'"
        " gradient"
    )
    return script_cause("coupled samples", text, by, evidence.framework)


def accumulation_cause(
    step: Values, full_batch: Values, micro_batches: Sequence[Values], framework: str
) -> Cause | None:
    """Return the cause if a step weighs its micro-batches otherwise than the whole batch does.

    The step's gradient is then the mean of its micro-batches' gradients.
    """
    weights = explaining_weights(micro_batches, full_batch)
    # Else they are sums, divided by a number that does not depend on the micro-batch.
    if (
        weights is None
        or abs(float(weights.sum()) - 1) > _NEARLY
        or not is_same(step, mean_of(micro_batches))
    ):
        return None
    shares = ", ".join(f"{weight:.3f}" for weight in weights)
    text = (
        "the step is a mean of its micro-batches' means, which have unequal numbers of targets: the"
        f" whole batch weighs them by {shares}; so the step depends on how its samples are cut, on"
        " one process, too"
    )
    by = (
        f"the step's samples in one batch: weighed by {shares}, the micro-batches' gradients are"
        " its gradient"
    )
    return script_cause("gradient accumulation", text, by, framework)
