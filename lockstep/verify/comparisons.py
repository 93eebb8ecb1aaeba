"""Compares a rank's tensors with the reference's, within bounds that rounding explains.

Gradients may differ by the rounding of another summation order (`StepObserver.bounds`), and updated
values by its effect on the optimizer's update; if gradients are sent in 16 bits, also by that
rounding. A float64 reference distinguishes rounding from an error where these bounds are too
narrow.

Tests: tests/verify/test_updates.py, tests/verify/test_faults.py
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lockstep.strategy import strategy_named
from lockstep.tensors import local, shard_like
from lockstep.trainer import Trainer
from lockstep.verify.algebra import CEILING, relation
from lockstep.verify.differences import SCALAR_TOLERANCE, TensorDifference
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
    piece = local(mine).detach().cpu()
    target = shard_like(reference, mine)
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


def message_rounding(trainer: Trainer) -> tuple[float, float]:
    """Return how the type in which gradients are sent widens their bounds.

    The result is (factor, floor per unit of a step's scale).
    """
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16}
    name = strategy_named(trainer.layout.strategy).message_type(trainer.config.step)
    if name not in kinds:
        return 1.0, 0.0
    info = torch.finfo(kinds[name])
    coarser = unit_roundoff(kinds[name]) / unit_roundoff(torch.float32)
    # Below the smallest normal number, the rounding error no longer shrinks with the number.
    return 2 * coarser, info.smallest_normal * info.eps * trainer.layout.world_size


def limit_of_norm(reference: StepFacts, factor: float, floor: float) -> float:
    """Return the relative bound of the norm.

    A norm changes by at most the norm of the change of its vector.
    """
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
            piece = compare_tensor(mine, gradient, allowed)
            if (
                piece.excess > 1.0
                and mine is not None
                and gradient is not None
                and mine.numel() <= _LARGEST_RELATED
            ):
                related = relation(local(mine).cpu(), shard_like(gradient, mine))
                piece = replace(piece, relation=related)
            found[GRADIENT][name] = piece
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
    """Compare gradients with the float64 reference.

    They may be up to four times as far from it as one process is.

    Return the differences; and if one process in float32 is far from the reference too, the reason,
    else "".
    """
    found = _missing(names, gradients, in_float32)
    for name, mine in gradients.items():
        true = stored.get(GRADIENT, name)
        single = in_float32.get(GRADIENT, name)
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
    """Compare gradients with the reference within the effect of changed last bits.

    They may differ by up to four times the effect of changing the last bits of parameters.

    Return as `compare_with_float64`; the reason if last bits move the reference so far that they
    would excuse anything.
    """
    pairs = {
        name: (perturbed.get(GRADIENT, name), reference.get(GRADIENT, name)) for name in gradients
    }
    known = {name: (a, b) for name, (a, b) in pairs.items() if a is not None and b is not None}
    moved = {name: float((a.double() - b.double()).norm()) for name, (a, b) in known.items()}
    in_all = math.sqrt(
        sum(float(b.double().square().sum()) for _, b in pairs.values() if b is not None)
    )
    uncertain = math.sqrt(sum(own * own for own in moved.values())) / max(in_all, 1e-300)
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
    return replace(piece, excess=math.sqrt(piece.square) / max(allowed, 1e-300))
