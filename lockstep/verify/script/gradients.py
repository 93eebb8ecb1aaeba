"""Names why ranks of a script have another gradient than one process, from how gradients of parts add up.

Each rank's own gradient, of its samples alone, is seen before ranks are reduced, or taken by one
process. The gradient with which ranks step is compared with sums of these, parameter by parameter,
and so is that of one process.

Tests: tests/verify/test_script.py
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lockstep.errors import listed
from lockstep.verify.script.outcome import NORMALISATION, ScriptCause, cause
from lockstep.verify.script.record import ScriptRecord, Tensors

Vector = NDArray[np.float64]
EXACT = 1e-4  # relative difference up to which gradients are taken for equal
_FITS = 1e-3  # relative residual up to which a gradient is a weighted sum of others
_BY_PARTS = "gradients of each rank's samples alone"


def unequal_names(mine: Tensors, right: Tensors) -> list[str]:
    """Return the names of tensors that differ."""
    return [
        name for name in right if name not in mine or not np.array_equal(mine[name], right[name])
    ]


def relative(mine: Vector, right: Vector) -> float:
    """Return the norm of the difference over the norm of `right`."""
    off = float(np.linalg.norm(mine - right) / max(float(np.linalg.norm(right)), 1e-300))
    return off if off == off else float("inf")


def vector(tensors: Tensors, sizes: dict[str, int]) -> Vector:
    """Return tensors as one vector; what is missing is 0, and what FSDP1 pads is left out."""
    parts = []
    for name, size in sizes.items():
        flat = tensors[name].flatten()[:size].double().numpy() if name in tensors else np.zeros(0)
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
    ranks: list[Vector]  # of each unit of ranks, as its optimizer steps with it
    reference: Vector  # of one process with all samples
    # of each unit's samples alone, before ranks are reduced; empty if they could not be seen
    own: list[Vector]
    framework: str  # whose loop it is

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Slice of each parameter in a vector, by name."""
        return slices_of(self.sizes)


def same(mine: Vector, right: Vector) -> bool:
    """Return whether two gradients are equal up to rounding."""
    return relative(mine, right) <= EXACT or (not mine.any() and not right.any())


def mean_of(parts: Sequence[Vector]) -> Vector:
    """Return the mean of vectors."""
    total: Vector = sum(parts, np.zeros_like(parts[0]))
    return total / len(parts)


def _weights_of(parts: Sequence[Vector], right: Vector) -> Vector | None:
    """Return the weights with which vectors add up to another, or None if they don't, or not in one way alone."""
    matrix = np.stack(list(parts), axis=1)
    weights, _, rank, _ = np.linalg.lstsq(matrix, right, rcond=1e-6)
    if rank < len(parts) or relative(matrix @ weights, right) > _FITS:
        return None
    return np.asarray(weights, dtype=np.float64)


def _explaining_weights(parts: Sequence[Vector], right: Vector) -> Vector | None:
    """Return weights that leave a tenth at most of what the mean leaves, or None: then the difference is another."""
    weights = _weights_of(parts, right)
    if weights is None or min(weights) < 0:
        return None
    matrix = np.stack(list(parts), axis=1)
    explains = relative(matrix @ weights, right) <= 0.1 * relative(matrix.mean(axis=1), right)
    return weights if explains else None


def reduction_cause(evidence: GradientEvidence) -> ScriptCause | None:
    """Return the cause if ranks don't step with the mean of their own gradients.

    Each parameter is judged by itself.
    """
    apart: dict[str, list[str]] = {}
    for name, at in evidence.slices.items():
        own = [part[at] for part in evidence.own]
        final = [rank[at] for rank in evidence.ranks]
        right = evidence.reference[at]
        floor = 1e-6 * float(np.linalg.norm(evidence.reference))
        if any(
            not same(one, right) and float(np.linalg.norm(one - right)) > floor for one in final
        ):
            apart.setdefault(_relation(final, own), []).append(name)
    apart.pop("", None)
    if not apart:
        return None
    # Of several relations the one of most parameters comes first; unknown ones last.
    relation = max(apart, key=lambda one: (one != _OTHER, len(apart[one])))
    if relation == _OTHER:
        return None
    name, _, rank = relation.partition(" ")
    kind, what = _SAID[name]
    which = (
        "" if len(apart[relation]) == len(evidence.sizes) else f" of {listed(apart[relation], 5)}"
    )
    text = what.format(which=which, ranks=len(evidence.own), rank=rank)
    return cause(
        kind, text, f"{_BY_PARTS}: added up so, they are the ranks' gradient", evidence.framework
    )


_OTHER = "other"
_SAID = {
    "own": (
        "gradient synchronisation",
        (
            "the gradient{which} is not synchronised: each rank's optimizer uses the "
            "gradient of its own samples"
        ),
    ),
    "divided": (
        "gradient synchronisation",
        (
            "the gradient{which} is not synchronised, and divided by the number of "
            "ranks: each rank's optimizer uses its own"
        ),
    ),
    "only": ("gradient synchronisation", "the gradient{which} on all ranks is rank {rank}'s alone"),
    "zero": (
        "gradient synchronisation",
        "the gradient{which} is lost: it is 0 where the ranks' own gradients are not",
    ),
    "sum": (
        "sum of gradients",
        "the gradient{which} is the sum over ranks, {ranks} × the mean that one process has",
    ),
    "twice": (
        "sum of gradients",
        "the gradient{which} is divided by the number of ranks twice: 1/{ranks} of the mean",
    ),
    "times": ("sum of gradients", "the gradient{which} is {rank} × the mean over ranks"),
    "weighed": (
        "weights of ranks",
        "the ranks' gradients{which} count {rank}, and 1/{ranks} each in a mean",
    ),
    "wrong": (
        "gradient synchronisation",
        "the gradient{which} on rank {rank} is not the mean over ranks, and on the others it is",
    ),
}


def _relation(final: Sequence[Vector], own: Sequence[Vector]) -> str:
    """Return how ranks' gradients of one parameter come from their own ones; empty: they are the mean."""
    mean, ranks = mean_of(own), len(own)
    if any(not same(one, final[0]) for one in final[1:]):
        if all(same(one, mine) for one, mine in zip(final, own, strict=True)):
            return "own"
        if all(same(one * ranks, mine) for one, mine in zip(final, own, strict=True)):
            return "divided"
        wrong = [rank for rank, one in enumerate(final) if not same(one, mean)]
        return f"wrong {listed(list(map(str, wrong)))}" if len(wrong) < ranks else _OTHER
    first = final[0]
    if same(first, mean):
        return ""
    if not first.any():
        return "zero"
    for name, right in (("sum", mean * ranks), ("twice", mean / ranks)):
        if same(first, right):
            return name
    only = [rank for rank, mine in enumerate(own) if same(first, mine)]
    if only:
        return f"only {only[0]}"
    times = float(first @ mean) / max(float(mean @ mean), 1e-300)
    if relative(first, times * mean) <= _FITS:
        return f"times {times:.3g}"
    weights = _weights_of(own, first)
    if weights is not None:
        return "weighed " + ", ".join(f"{weight:.3g}" for weight in np.round(weights, 6) + 0.0)
    return _OTHER


def weighing_cause(evidence: GradientEvidence) -> ScriptCause | None:
    """Return the cause if one process weighs the ranks' own gradients otherwise than by their mean."""
    weights, ranks = _explaining_weights(evidence.own, evidence.reference), len(evidence.own)
    if weights is None:
        return None
    said = ", ".join(f"{weight:.3f}" for weight in weights)
    by = (
        f"{_BY_PARTS}: their mean is the ranks' gradient; weighed by {said} they are the gradient"
        " of one process"
    )
    total = float(weights.sum())
    if abs(total - 1) < 0.02:
        text = (
            "each rank's loss is a mean over its own targets, and ranks have unequal numbers of"
            " them: one process "
        )
        text += (
            f"weighs the ranks' samples by {said}, and their average by"
            f" {', '.join([f'{1 / ranks:.3f}'] * ranks)}"
        )
        return cause(NORMALISATION, text, by, evidence.framework)
    if max(weights) - min(weights) < 0.02 * max(weights):
        text = (
            f"the gradient of all parameters is {1 / total:.3g} × that of one process on the same"
            " samples"
        )
        if abs(total - ranks) < 0.02 * ranks:
            text = (
                f"the gradient is {1 / total:.3g} × that of one process: each rank's loss is a sum"
                " over its "
            )
            text += f"samples, and averaging over ranks divides it by {ranks}"
        return cause("sum of gradients", text, by, evidence.framework)
    wrong = [rank for rank, weight in enumerate(weights) if abs(weight * ranks - 1) > 0.02]
    if len(wrong) < ranks:
        times = {rank: 1 / (weights[rank] * ranks) for rank in wrong if weights[rank] > 0}
        text = "; ".join(
            f"rank {rank}'s gradient is {k:.3g} × that of its samples" for rank, k in times.items()
        )
        return cause("computation of a rank", text, by, evidence.framework)
    return None


def computation_cause(
    evidence: GradientEvidence,
    alone: Sequence[Vector],
    ranks: Sequence[ScriptRecord],
    processes: Sequence[ScriptRecord],
    number: int,
) -> ScriptCause | None:
    """Return the cause if a rank computes another gradient from its samples than one process does.

    `alone` has the gradients of one process on each unit's samples, `processes` its records,
    `ranks` each unit's first.
    """
    for place, (mine, right) in enumerate(zip(evidence.own, alone, strict=True)):
        floor = 1e-6 * float(np.linalg.norm(right))
        wrong = {name: at for name, at in evidence.slices.items() if not same(mine[at], right[at])}
        names = [name for name, at in wrong.items() if np.linalg.norm(mine[at] - right[at]) > floor]
        if not names:
            continue
        there, here = ranks[place].steps[number], processes[place].steps[number]
        module = _first_module(there.flow, here.flow)
        times = float(mine @ right) / max(float(right @ right), 1e-300)
        size = f"{times:.3g} × " if relative(mine, times * right) < _FITS else "other than "
        if module:
            where = f"the forward pass differs from {module} on"
        elif there.losses != here.losses and not np.allclose(there.losses, here.losses, rtol=1e-5):
            where = (
                "modules return the same, and the loss differs: its targets, weights or scale do"
            )
        else:
            where = (
                "outputs and loss are the same, and the backward pass differs: a hook, or a"
                " function of its own"
            )
        text = (
            f"rank {place}'s own gradient of {listed(names, 5)} is {size}that of one process on its"
            f" samples; {where}"
        )
        by = "one process on each rank's samples alone"
        return replace(cause("computation of a rank", text, by, evidence.framework), module=module)
    return None


def _first_module(
    mine: Sequence[tuple[str, float, float]], right: Sequence[tuple[str, float, float]]
) -> str:
    """Return the first module whose output differs; empty if none does."""
    for one, other in zip(mine, right, strict=False):
        if one[0] != other[0]:
            return one[0] or "the model"
        if not np.allclose(one[1:], other[1:], rtol=1e-4, atol=1e-6):
            return one[0] or "the model"
    return "" if len(mine) == len(right) else "the number of calls"


def coupling_cause(evidence: GradientEvidence, alone: Sequence[Vector]) -> ScriptCause | None:
    """Return the cause if one process that is given its batch in the ranks' parts averages to the ranks' gradient."""
    if any(not same(rank, mean_of(alone)) for rank in evidence.ranks):
        return None
    text = (
        "the loss of the whole batch is no mean of the losses of its parts: it couples samples"
        " (negatives or a "
    )
    text += (
        "balance over the batch, statistics of the batch), or has terms that are divided by"
        " different counts"
    )
    by = (
        "one process on each rank's samples alone: the mean of these gradients is the ranks'"
        " gradient"
    )
    return cause("coupled samples", text, by, evidence.framework)


def shared_cause(evidence: GradientEvidence) -> ScriptCause | None:
    """Return how the gradients of ranks that share a model come from those of one process, parameter by parameter."""
    found: dict[str, list[str]] = {}
    floor = 1e-6 * float(np.linalg.norm(evidence.reference))
    for name, at in evidence.slices.items():
        right, ranks = evidence.reference[at], [rank[at] for rank in evidence.ranks]
        wrong = [
            r
            for r, one in enumerate(ranks)
            if not same(one, right) and np.linalg.norm(one - right) > floor
        ]
        if not wrong:
            continue
        total: Vector = sum(ranks, np.zeros_like(right))
        if same(total, right):
            found.setdefault("partial", []).append(name)
            continue
        times = [float(one @ right) / max(float(right @ right), 1e-300) for one in ranks]
        fits = all(relative(one, k * right) <= _FITS for one, k in zip(ranks, times, strict=True))
        if fits:
            where = "" if len(wrong) == len(ranks) else f" on rank {listed(list(map(str, wrong)))}"
            found.setdefault(f"{times[wrong[0]]:.3g} × that of one process{where}", []).append(name)
        elif any(not same(one, ranks[0]) for one in ranks[1:]):
            found.setdefault("apart", []).append(name)
    if not found:
        return None
    by = "the gradients of ranks and of one process"
    if "partial" in found:
        text = (
            f"the gradient of {listed(found['partial'], 5)} is not summed over the ranks that share"
            " the model: each "
        )
        text += "has the part that comes through its own part of the layers"
        return cause("gradient synchronisation", text, by, evidence.framework)
    names = found.pop("apart", [])
    if found:
        text = "; ".join(
            f"the gradient of {listed(held, 5)} is {what}" for what, held in found.items()
        )
        return cause("sum of gradients", text, by, evidence.framework)
    text = (
        f"the gradient of {listed(names, 5)}, which all ranks hold whole, differs from rank to rank"
    )
    return cause("gradient synchronisation", text, by, evidence.framework)


def accumulation_cause(
    step: Vector, whole: Vector, micro_batches: Sequence[Vector], framework: str
) -> ScriptCause | None:
    """Return the cause if a step is its micro-batches' mean gradient, and the whole batch weighs them otherwise."""
    weights = _explaining_weights(micro_batches, whole)
    # Else they are sums, divided by a number that does not depend on the micro-batch.
    if (
        weights is None
        or abs(float(weights.sum()) - 1) > 0.02
        or relative(step, mean_of(micro_batches)) > EXACT
    ):
        return None
    said = ", ".join(f"{weight:.3f}" for weight in weights)
    text = (
        "the step is a mean of its micro-batches' means, which have unequal numbers of targets: the"
        " whole batch "
    )
    text += (
        f"weighs them by {said}; so the step depends on how its samples are cut, on one"
        " process, too"
    )
    by = (
        f"the step's samples in one batch: weighed by {said}, the micro-batches' gradients are its"
        " gradient"
    )
    return cause("gradient accumulation", text, by, framework)
