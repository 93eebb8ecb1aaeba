"""Compares a rank's tensors with the reference's, within bounds that rounding explains.

Tells how wrong ones relate.

Gradients may differ by the rounding of another summation order (`StepObserver.bounds`), and updated
values by its effect on the optimizer's update; if gradients are sent in 16 bits, also by that
rounding. A float64 reference distinguishes rounding from an error where these bounds are too
narrow.

Tests: tests/verify/test_relations.py
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lockstep.mesh import local_chunk
from lockstep.parallel.parallel_model import local
from lockstep.strategy import strategy_named
from lockstep.trainer import Trainer
from lockstep.verify.differences import SCALAR_TOLERANCE, TensorDifference
from lockstep.verify.recorded_flow import CEILING, ITSELF, NOT_REDUCED
from lockstep.verify.trace import (
    BOUND,
    BUFFER,
    GRADIENT,
    VALUE,
    StepFacts,
    StepObserver,
    Stored,
    unit_roundoff,
)

TOO_FAR = "changed last bits of parameters move the gradient of one process by"
_LARGEST_RELATED = 1 << 24  # elements of a gradient whose relation to the reference is looked for
SAME = 1e-5  # relative difference up to which a relation holds
_SHIFTS = (1, -1, 2, -2)
_MOST_TERMS = 32  # micro-batches of a step whose weights in a sum are solved for
_SCALED = 2.0**-22  # relative rounding of a float32 that is scaled
# relative; a gradient that is farther from the sum over micro-batches is not that sum
_ALIKE = 1e-2


@torch.no_grad()
def compare_tensor(
    mine: Tensor | None, reference: Tensor | None, allowed: Tensor | float
) -> TensorDifference:
    """Compare a tensor, or a shard of it, with the whole reference.

    `allowed`: bound of each element, 0: equal bits.
    """
    if mine is None or reference is None:
        one_sided = mine is not reference
        return TensorDifference(missing=one_sided, excess=math.inf if one_sided else 0.0)
    piece, target = local(mine).detach().cpu(), shard_like(reference, mine)
    if piece.shape != target.shape:
        return TensorDifference(math.inf, math.inf)
    if torch.equal(_bits(piece), _bits(target)):
        return TensorDifference()
    off = (piece.double() - target.double()).abs()
    off = torch.where(piece == target, 0.0, off).nan_to_num(nan=math.inf)
    if isinstance(allowed, Tensor):
        limit = shard_like(allowed, mine).double()
        excess = torch.where(off > 0, off / limit.clamp(min=1e-300), 0.0)
    else:
        excess = (
            torch.where(off > allowed, math.inf, 0.0) if allowed else torch.full_like(off, math.inf)
        )
    return TensorDifference(
        float(excess.max()) if excess.numel() else 0.0, float(off.square().sum())
    )


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous().reshape(-1)
    return tensor.view(torch.uint8) if tensor.numel() else tensor


def shard_like(whole: Tensor, mine: Tensor) -> Tensor:
    """Return the part of a whole tensor that this rank holds of it."""
    if isinstance(mine, DTensor):
        mesh, coordinate = mine.device_mesh, mine.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(mine.placements):
            if isinstance(placement, Shard):
                whole = local_chunk(whole, placement.dim, mesh.size(axis), coordinate[axis])
    return whole


def message_rounding(trainer: Trainer) -> tuple[float, float]:
    """Return the effect of the type in which gradients are sent: (factor, floor per unit of a step's scale)."""
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16}
    name = strategy_named(trainer.layout.strategy).message_type(trainer.config.step)
    if name not in kinds:
        return 1.0, 0.0
    info = torch.finfo(kinds[name])
    coarser = unit_roundoff(kinds[name]) / unit_roundoff(torch.float32)
    # Below the smallest normal number, the rounding error no longer shrinks with the number.
    return 2 * coarser, info.smallest_normal * info.eps * trainer.layout.world_size


def limit_of_norm(reference: StepFacts, factor: float, floor: float) -> float:
    """Return the relative bound of the norm: it changes by at most the norm of the change of its vector."""
    size = math.sqrt(sum(norm * norm for norm in reference.norms.values()))
    moved = factor * reference.bound + floor * reference.scale * math.sqrt(reference.elements)
    return max(SCALAR_TOLERANCE, moved / max(size, 1e-300))


def compare_with_reference(
    trainer: Trainer,
    stored: Stored,
    observer: StepObserver | None = None,
    *,
    rate: float | None = None,
    exact: bool = True,
    factor: float = 1.0,
    floor: float = 0.0,
) -> dict[str, dict[str, TensorDifference]]:
    """Compare this rank's tensors with the reference's, in every bit if `exact`.

    Args:
        rate: the learning rate; unset: updated values must be equal.
        factor, floor: bounds of gradients become factor × bound + floor.
    """
    placed = trainer.placed
    found: dict[str, dict[str, TensorDifference]] = {GRADIENT: {}, VALUE: {}, BUFFER: {}}
    for name, parameter in placed.parameters.items():
        value, gradient, bound = (stored.get(kind, name) for kind in (VALUE, GRADIENT, BOUND))
        bound = bound if bound is None else bound * factor + floor
        if observer is not None and (name in observer.gradients or gradient is not None):
            allowed: Tensor | float = 0.0 if exact or bound is None else bound
            mine = observer.gradients.get(name)
            found[GRADIENT][name] = piece = compare_tensor(mine, gradient, allowed)
            if (
                piece.excess > 1.0
                and mine is not None
                and gradient is not None
                and mine.numel() <= _LARGEST_RELATED
            ):
                piece.relation = relation(local(mine).cpu(), shard_like(gradient, mine))
        allowed = 0.0
        if rate is not None and value is not None:
            if bound is not None and gradient is not None:
                # SGD's update moves by rate × bound. Adam's moves by less than 32 × rate ×
                # (relative error of the gradient's element), for any state: the slope of m̂/√v̂ in
                # g is at most (1−β₁)/√(1−β₂)/|g|, times the bias correction.
                off = (bound / gradient.abs().clamp(min=1e-300)).clamp(max=1.0)
                allowed = rate * (32 * off + bound) + 8 * unit_roundoff(value.dtype) * value.abs()
            elif value.is_floating_point():  # it may follow trained ones, as a teacher does
                allowed = 1e-5 * value.abs() + 1e-2 * rate
        found[VALUE][name] = compare_tensor(parameter.detach(), value, allowed)
    for name, buffer in placed.buffers.items():
        value = stored.get(BUFFER, name)
        small: Tensor | float = 0.0
        if not exact and value is not None and value.is_floating_point():
            small = 1e-5 * value.abs() + 1e-7
        found[BUFFER][name] = compare_tensor(buffer, value, small)
    return found


def compare_with_float64(
    names: Iterable[str], gradients: dict[str, Tensor], stored: Stored, in_float32: Stored
) -> tuple[dict[str, TensorDifference], str]:
    """Compare gradients with the float64 reference: up to four times as far from it as one process is.

    Return the differences; and if one process in float32 is far from the reference too, the reason,
    else "".
    """
    found = _missing(names, gradients, in_float32)
    for name, mine in gradients.items():
        true, single = stored.get(GRADIENT, name), in_float32.get(GRADIENT, name)
        if true is None or single is None:
            return {}, f"the float64 reference has no gradient of {name}"
        own = float((single.double() - true).norm())
        if own > CEILING * float(true.norm()):
            return {}, f"the float64 reference computes another gradient of {name}"
        found[name] = _compared(mine, true, own)
    return found, ""


def compare_with_perturbed(
    names: Iterable[str], gradients: dict[str, Tensor], perturbed: Stored, reference: Stored
) -> tuple[dict[str, TensorDifference], str]:
    """Compare gradients with the reference: up to four times the effect of changed last bits of parameters.

    Return as `compare_with_float64`; the reason if last bits move the reference so far that they
    would excuse anything.
    """
    pairs = {
        name: (perturbed.get(GRADIENT, name), reference.get(GRADIENT, name)) for name in gradients
    }
    known = {name: (a, b) for name, (a, b) in pairs.items() if a is not None and b is not None}
    moved = {name: float((a.double() - b.double()).norm()) for name, (a, b) in known.items()}
    whole = math.sqrt(
        sum(float(b.double().square().sum()) for _, b in pairs.values() if b is not None)
    )
    uncertain = math.sqrt(sum(own * own for own in moved.values())) / max(whole, 1e-300)
    if not uncertain <= CEILING:
        return {}, f"{TOO_FAR} {uncertain:.0%}"
    found = _missing(names, gradients, reference)
    for name, mine in gradients.items():
        is_known = name in known
        found[name] = (
            _compared(mine, known[name][1], moved[name])
            if is_known
            else TensorDifference(missing=True)
        )
    return found, ""


def _missing(
    names: Iterable[str], gradients: Mapping[str, Tensor], reference: Stored
) -> dict[str, TensorDifference]:
    missing = [
        name
        for name in names
        if name not in gradients and reference.get(GRADIENT, name) is not None
    ]
    return {name: TensorDifference(missing=True) for name in missing}


def _compared(mine: Tensor, right: Tensor, own: float) -> TensorDifference:
    """Compare a gradient that may be four times as far from the right one as `own`, in norm."""
    piece = compare_tensor(mine, right, 0.0)
    allowed = 4 * own + 8 * unit_roundoff(torch.float32) * float(right.double().norm())
    piece.excess = math.sqrt(piece.square) / max(allowed, 1e-300)
    return piece


# ---- how a wrong tensor relates to the right one ----


def distance(mine: Tensor, other: Tensor) -> float:
    """Return the norm of the difference over the norm of `other`; infinity for other shapes or numbers not finite."""
    if mine.shape != other.shape:
        return math.inf
    a, b = _array(mine), _array(other)
    if np.array_equal(a, b):
        return 0.0
    off = float(np.linalg.norm((a - b).ravel()) / max(float(np.linalg.norm(b.ravel())), 1e-300))
    return math.inf if math.isnan(off) else off


def _array(tensor: Tensor) -> Any:
    """Return a tensor as a NumPy array in double precision: operations on it pass no mode of torch's."""
    tensor = tensor.detach().cpu()
    wide = tensor if tensor.dtype != torch.bfloat16 else tensor.float()
    found = wide.numpy()
    return found if tensor.is_complex() else found.astype(np.float64)


@torch.no_grad()
def relation(mine: Tensor, right: Tensor, others: Mapping[str, Tensor] | None = None) -> str:
    """Return a clause on how `mine` relates to the right tensor.

    Without a relation, how far it is off.

    `others` is what it may be instead, by a name.
    """
    if mine.shape != right.shape:
        if mine.ndim == 2 and mine.T.shape == right.shape and distance(mine.T, right) <= SAME:
            return "is the reference, transposed"
        return f"has the shape {list(mine.shape)} instead of {list(right.shape)}"
    a, b = mine.detach().double(), right.detach().double()
    if not bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all()):
        return "is not finite"
    if not bool(a.any()):
        return "is 0"
    for name, other in (others or {}).items():
        if distance(a, other) <= SAME:
            return f"is {name}"
    times = multiple(a, b)
    if times is not None:
        return f"is {in_words(times)} the reference"
    if not mine.is_floating_point() or mine.numel() > 1:
        offset = (a - b).flatten()
        if bool((offset == offset[0]).all()) and offset[0]:
            return f"is the reference {'+' if offset[0] > 0 else '−'} {abs(float(offset[0])):g}"
    for dim in (dim for dim in range(mine.ndim) if mine.shape[dim] > 2):
        for by in _SHIFTS:  # all but the ends agree when the reference is moved
            length = a.shape[dim] - abs(by)
            moved, other = a.narrow(dim, max(by, 0), length), b.narrow(dim, max(-by, 0), length)
            if bool(other.any()) and distance(moved, other) <= SAME:
                return f"is the reference shifted by {by} along dim {dim}"
    if mine.ndim == 2 and mine.shape[0] == mine.shape[1] and distance(a.T, b) <= SAME:
        return "is the reference, transposed"
    if mine.numel() > 2 and torch.equal(a.flatten().sort().values, b.flatten().sort().values):
        return "has the reference's values in another order"
    for dtype in (torch.bfloat16, torch.float16):
        if (
            mine.is_floating_point()
            and torch.equal(mine.to(dtype).to(mine.dtype), mine)
            and distance(a, b) < 0.05
        ):
            return f"is rounded to {str(dtype).removeprefix('torch.')}"
    zero = (a == 0) & (b != 0)
    if bool(zero.any()) and distance(torch.where(zero, 0.0, b), a) <= SAME:
        return f"is 0 in {int(zero.sum())} of {mine.numel()} elements, else the reference"
    return f"differs by {distance(a, b):.1e} of its norm"


def multiple(mine: Tensor, right: Tensor) -> float | None:
    """Return the factor between two tensors if there is one, other than 1."""
    mine, right = mine.detach().double(), right.detach().double()
    size = float((right * right).sum())
    if not size:
        return None
    times = float((mine * right).sum()) / size
    if abs(times - 1) <= SAME or distance(mine, right * times) > SAME * max(
        1.0, abs(1 / times or 1)
    ):
        return None
    return times


def in_words(times: float) -> str:
    """Return `2 ×`, `1/3 of` or `0.37 ×` for a factor."""
    if abs(times - round(times)) <= SAME * abs(times) and round(times):
        return f"{round(times)} ×"
    near = Fraction(times).limit_denominator(64)
    if near and abs(times - float(near)) <= SAME * abs(times):
        return f"{near} of"
    return f"{times:.6g} ×"


def reduced_relation(
    gradient: Tensor,
    whole: Tensor,
    terms: dict[int, Tensor],
    mine: Sequence[int],
    ranks: int,
    unit: float,
    scale: float,
) -> str:
    """Return a clause on how a gradient relates to the reference's, the `whole`.

    Args:
        terms: what each micro-batch adds; empty if that is not known. Those of this rank are
            `mine`.
        unit: factor between this rank's terms and the reference's, which a mean over ranks would
            have undone.
        scale: factor by which the sum was multiplied after its reduction.
    """
    how = relation(gradient, whole, _sums(whole, terms, mine, ranks, unit))
    if not how.startswith("differs"):
        return how
    before = gradient.detach().double() / scale
    for dtype in (torch.bfloat16, torch.float16):
        if distance(before.to(dtype).double(), before) <= _SCALED:
            return (
                f"is rounded to {str(dtype).removeprefix('torch.')} before it is scaled to the mean"
            )
    return _weights(gradient, whole, terms, mine) or how


def _weights(gradient: Tensor, whole: Tensor, terms: dict[int, Tensor], mine: Sequence[int]) -> str:
    """Return by what each micro-batch weighs in a sum, if it is one."""
    if not 1 < len(terms) <= _MOST_TERMS or gradient.numel() < len(terms):
        return ""
    columns = torch.stack([term.flatten() for term in terms.values()], dim=1)
    both = torch.stack([gradient.double().flatten(), whole.double().flatten()], dim=1)
    solved = torch.linalg.lstsq(columns, both).solution
    if distance(columns @ solved, both) > SAME:
        return ""
    total, right = columns.sum(1), both[:, 1]
    if distance(total * (total @ right) / max(float(total @ total), 1e-300), right) > _ALIKE:
        largest = float(solved[:, 1].abs().max())
        shares = zip(terms, (solved[:, 1] / largest).tolist(), strict=True)
        return (
            f"{ITSELF} weighs"
            f" {', '.join(f'micro-batch {m} by {round(share, 3) + 0.0:g}' for m, share in shares)}"
        )
    weights = {
        m: round(float(a / b), 3) + 0.0
        for m, (a, b) in zip(terms, solved.tolist(), strict=True)
        if b
    }
    missing = any(weight == 0 for m, weight in weights.items() if m not in mine)
    listed = ", ".join(f"micro-batch {m} by {weight:g}" for m, weight in weights.items())
    return f"weighs {listed}" + (f": those of other ranks are {NOT_REDUCED}" if missing else "")


def _sums(
    whole: Tensor, terms: dict[int, Tensor], mine: Sequence[int], ranks: int, unit: float
) -> dict[str, Tensor]:
    """Return what a reduction that goes wrong may leave, by a name."""
    if not terms:
        return {}
    total = torch.stack(list(terms.values())).sum(0)
    size = float((total * total).sum())
    scale = float((total * whole.double()).sum()) / size if size else 0.0
    own = torch.stack([terms[m] for m in mine]).sum(0) if mine else torch.zeros_like(total)
    sums = {"this rank's own sum": own, "the sum of the other ranks": total - own}
    if mine:
        sums["this rank's last micro-batch's"] = terms[mine[-1]]
        sums["this rank's first micro-batch's"] = terms[mine[0]]
    found: dict[str, Tensor] = {}
    for what, each in sums.items():
        if bool(each.any()):
            found[f"{what}, {NOT_REDUCED}" if each is own else what] = each * scale * unit
            found[f"{ranks} × {what}"] = each * scale * unit * ranks
            found[f"1/{ranks} of {what}"] = each * scale * unit / ranks
    found["the reference plus this rank's own sum"] = (total + own) * scale
    return found
