"""How far a topology may be from the reference, and how far what a rank holds is from it.

Gradients may be off by what another order of summation makes of them (`Watch.bounds`), values by what the optimizer
makes of that; where gradients travel in 16 bits, by what that rounds away. A float64 reference tells rounding from
error where these bounds are too narrow.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.strategy import strategy_named
from lockstep.trainer import Trainer
from lockstep.verify.differences import SCALAR_TOLERANCE, Piece, compared
from lockstep.verify.trace import BOUND, BUFFER, GRADIENT, VALUE, Facts, Stored, unit_roundoff
from lockstep.verify.watch import Watch


@dataclass(frozen=True)
class Wire:
    """What gradients lose on their way: bounds are multiplied by `factor` and get `floor` × the step's scale added."""

    factor: float = 1.0
    floor: float = 0.0


def wire_of(trainer: Trainer) -> Wire:
    """That of a trainer's strategy."""
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16}
    name = strategy_named(trainer.layout.strategy).message_type(trainer.config.step)
    if name not in kinds:
        return Wire()
    info = torch.finfo(kinds[name])
    coarser = unit_roundoff(kinds[name]) / unit_roundoff(torch.float32)
    # Below the smallest normal number, what is lost no longer shrinks with the number.
    return Wire(2 * coarser, info.smallest_normal * info.eps * trainer.layout.world_size)


def limit_of_norm(reference: Facts, wire: Wire) -> float:
    """How far the norm may be off, relatively: a norm moves by at most the norm of what its vector moves by."""
    size = math.sqrt(sum(norm * norm for norm in reference.norms.values()))
    moved = wire.factor * reference.bound + wire.floor * reference.scale * math.sqrt(reference.elements)
    return max(SCALAR_TOLERANCE, moved / max(size, 1e-300))


def against(
    trainer: Trainer, stored: Stored, watch: Watch | None = None, *, rate: float | None = None, exact: bool = True,
    factor: float = 1.0, floor: float = 0.0,
) -> dict[str, dict[str, Piece]]:  # fmt: skip
    """What this rank holds against what the reference wrote down.

    Args:
        rate: the learning rate, where updated values may be off as their gradients are.
        factor, floor: bounds of gradients are multiplied by the first, and get the second added.
    """
    placed = trainer.placed
    found: dict[str, dict[str, Piece]] = {GRADIENT: {}, VALUE: {}, BUFFER: {}}
    for name, parameter in placed.parameters.items():
        value, gradient, bound = (stored.get(kind, name) for kind in (VALUE, GRADIENT, BOUND))
        bound = bound if bound is None else bound * factor + floor
        if watch is not None and (name in watch.gradients or gradient is not None):
            allowed: Tensor | float = 0.0 if exact or bound is None else bound
            found[GRADIENT][name] = compared(watch.gradients.get(name), gradient, allowed)
        allowed = 0.0
        if rate is not None and bound is not None and gradient is not None and value is not None:
            allowed = _bound_of_value(value, gradient, bound, rate)
        found[VALUE][name] = compared(parameter.detach(), value, allowed)
    for name, buffer in placed.buffers.items():
        value = stored.get(BUFFER, name)
        small: Tensor | float = 0.0
        if not exact and value is not None and value.is_floating_point():
            small = 1e-5 * value.abs() + 1e-7
        found[BUFFER][name] = compared(buffer, value, small)
    return found


def against_double(gradients: dict[str, Tensor], stored: Stored, in_float32: Stored) -> tuple[dict[str, Piece], str]:
    """These ranks' gradients against the float64 reference: up to four times as far from it as one process is.

    Returns:
        the pieces, and why they mean nothing: one process in float32 is far from it, too. Else "".
    """
    found = {}
    for name, mine in gradients.items():
        true, single = stored.get(GRADIENT, name), in_float32.get(GRADIENT, name)
        if true is None or single is None:
            return {}, f"the float64 reference has no gradient of {name}"
        own, size = float((single.double() - true).norm()), float(true.norm())
        if own > 0.01 * size:
            return {}, f"the float64 reference computes another gradient of {name}"
        piece = compared(mine, true, 0.0)
        piece.excess = math.sqrt(piece.square) / max(4 * own + 8 * unit_roundoff(torch.float32) * size, 1e-300)
        found[name] = piece
    return found, ""


def against_nudged(gradients: dict[str, Tensor], nudged: Stored, reference: Stored) -> dict[str, Piece]:
    """These ranks' gradients against the reference's: up to four times as far as last bits of parameters move those."""
    found = {}
    for name, mine in gradients.items():
        moved, single = nudged.get(GRADIENT, name), reference.get(GRADIENT, name)
        if moved is None or single is None:
            found[name] = Piece(missing=True)
            continue
        own, size = float((moved.double() - single.double()).norm()), float(single.double().norm())
        piece = compared(mine, single, 0.0)
        piece.excess = math.sqrt(piece.square) / max(4 * own + 8 * unit_roundoff(torch.float32) * size, 1e-300)
        found[name] = piece
    return found


def _bound_of_value(value: Tensor, gradient: Tensor, bound: Tensor, rate: float) -> Tensor:
    """How far an updated value may be off whose gradient may be off by `bound`.

    SGD's update moves by rate × bound. Adam's moves by less than 32 × rate × (relative error of the gradient's
    element), for any state: the slope of m̂/√v̂ in g is at most (1−β₁)/√(1−β₂)/|g|, times what corrects the bias.
    """
    relative = (bound / gradient.abs().clamp(min=1e-300)).clamp(max=1.0)
    return rate * (32 * relative + bound) + 8 * unit_roundoff(value.dtype) * value.abs()
