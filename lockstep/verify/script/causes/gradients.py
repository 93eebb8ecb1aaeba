"""Names why ranks of a script compute another gradient than one process.

The reason follows from how gradients of parts add up. (`lockstep.verify.script.causes.reduction`: ranks
compute what they should, and are reduced otherwise.)

Each rank's own gradient, of its samples alone, is seen before ranks are reduced, or taken by one
process. The gradient with which ranks step is compared with sums of these
(`lockstep.verify.algebra`), parameter by parameter, and so is that of one process.

Tests: tests/verify/test_algebra.py, tests/verify/test_script.py
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lockstep.errors import listed
from lockstep.verify.algebra import (
    ADDS_UP,
    Values,
    distance,
    explaining_weights,
    factor,
    mean_of,
)
from lockstep.verify.comparison_result import Cause
from lockstep.verify.script.causes.fixes import NORMALISATION, script_cause
from lockstep.verify.script.record import RecordedStep, ScriptRecord
from lockstep.verify.script.world import Tensors

EXACT = 1e-4  # relative difference up to which gradients are taken for equal
_NEARLY = 0.02  # relative difference up to which a weight is taken for another number
_NO_MORE_THAN_ROUNDING = 1e-6  # relative to the norm of all gradients
BY_PARTS = "gradients of each rank's samples alone"
COMPUTATION = "computation of a rank"
NOT_SYNCHRONISED = "gradient synchronisation"
SUM = "sum of gradients"
Flow = Sequence[tuple[str, float, float]]
"""Name and output, as two numbers, of each call of a module."""


def vector(tensors: Tensors, sizes: dict[str, int]) -> Values:
    """Return tensors as one vector; what is missing is 0, and what FSDP1 pads is left out."""
    parts = []
    for name, size in sizes.items():
        flat = np.zeros(0)
        if name in tensors:
            flat = tensors[name].flatten()[:size].double().numpy()
        parts.append(np.pad(flat, (0, size - len(flat))))
    return np.concatenate(parts) if parts else np.zeros(0)


def slices_of(sizes: dict[str, int]) -> dict[str, slice]:
    """Return the slice of each parameter in a vector, from their numbers of elements."""
    ends = np.cumsum(list(sizes.values())).tolist()
    return {
        name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)
    }


@dataclass
class GradientEvidence:
    """Gradients of one step, as vectors."""

    sizes: dict[str, int]  # name → number of elements, in the vectors' order
    ranks: list[Values]  # of each unit of ranks, as its optimizer steps with it
    reference: Values  # of one process with all samples
    own: list[Values]  # of each unit's samples alone, before ranks are reduced; empty if unseen
    framework: str  # whose loop it is

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Slice of each parameter in a vector, by name."""
        return slices_of(self.sizes)


def is_same(mine: Values, right: Values) -> bool:
    """Return whether two gradients are equal up to rounding."""
    return distance(mine, right) <= EXACT


def is_wrong(mine: Values, right: Values, floor: float) -> bool:
    """Return whether a parameter's gradient differs by more than the rounding of all gradients."""
    return not is_same(mine, right) and float(np.linalg.norm(mine - right)) > floor


def floor_of(gradient: Values) -> float:
    """Return the size of a difference that the rounding of all gradients may have made."""
    return _NO_MORE_THAN_ROUNDING * float(np.linalg.norm(gradient))


def unscaled(own: list[Values], of_process: Values, right: Values) -> list[Values]:
    """Return ranks' own gradients divided by what the script divides its gradients by.

    A script may multiply its loss, and divide its gradients before the update, as where 16 bits
    would lose small ones. One process shows by which number.

    Args:
        own: of each rank, before the script divides them.
        of_process: the same of one process.
        right: that of one process with which its optimizer steps.
    """
    times = factor(of_process, right)
    is_scaled = times > 0 and not is_same(of_process, right)
    if not is_scaled or not is_same(of_process, times * right):
        return own
    return [gradient / times for gradient in own]


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
    module = _first_module(step.flow, right.flow)
    if module:
        return module, f"the forward pass differs from {module} on"
    if step.losses != right.losses and not np.allclose(step.losses, right.losses, rtol=1e-5):
        return "", "modules return the same, and the loss differs: its targets, weights or scale do"
    return "", (
        "outputs and loss are the same, and the backward pass differs: a hook, or a function of its"
        " own"
    )


def _first_module(mine: Flow, right: Flow) -> str:
    """Return the first module whose output differs; empty if none does.

    A wrapper may call modules around those that one process calls: these are left out.
    """
    called = {name for name, *_ in mine} & {name for name, *_ in right}
    mine = [call for call in mine if call[0] in called]
    right = [call for call in right if call[0] in called]
    for (name, *numbers), (other, *right_numbers) in zip(mine, right, strict=False):
        if name != other or not _is_same_output(numbers, right_numbers):
            return name or "the model"
    return "" if len(mine) == len(right) else "the number of calls"


def is_same_flow(mine: Flow, right: Flow) -> bool:
    """Return whether two steps call the same modules, which return the same up to rounding."""
    return bool(mine) and not _first_module(mine, right)


def first_output_of_all(ranks: Sequence[Flow], right: Flow) -> str | None:
    """Return the first module whose output all ranks have alike, and one process has another.

    None if there is none, or ranks do not call the same modules as one process.
    """
    flows = [right, *ranks]
    called = set.intersection(*({name for name, *_ in flow} for flow in flows))
    flows = [[call for call in flow if call[0] in called] for flow in flows]
    for (name, *numbers), *calls in zip(*flows, strict=False):
        if any(other != name for other, *_ in calls):
            return None
        (_, *mine), *others = calls
        is_alike = all(_is_same_output(other, mine) for _, *other in others)
        if is_alike and not _is_same_output(mine, numbers):
            module: str = name
            return module
    return None


def _is_same_output(mine: Sequence[float], right: Sequence[float]) -> bool:
    return np.allclose(mine, right, rtol=1e-4, atol=1e-6)


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


# ---- ranks that share a model ----


def shared_cause(evidence: GradientEvidence) -> Cause | None:
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
