"""Compares a rank's tensors with the reference's, within bounds that rounding explains.

Gradients may differ by the rounding of another summation order (`StepObserver.bounds`), and updated
values by its effect on the optimizer's update; if gradients are sent in 16 bits, also by that
rounding. A float64 reference distinguishes rounding from an error where these bounds are too
narrow.

Tests: tests/verify/test_updates.py, tests/verify/test_faults.py
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.parallel.parallel_model import ParallelModel
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


@dataclass(frozen=True)
class MessageRounding:
    """Describes how the type in which gradients are sent widens the bounds of their elements.

    A bound becomes `factor` × bound + `floor` × scale, where the scale is that of the step
    (`StepFacts.scale`). Gradients in fp32 leave the bounds as they are.
    """

    factor: float = 1.0
    floor: float = 0.0

    @classmethod
    def of(cls, trainer: Trainer) -> "MessageRounding":
        """Return the rounding of the type in which the trainer's strategy sends gradients."""
        kinds = {"fp16": torch.float16, "bf16": torch.bfloat16}
        name = strategy_named(trainer.layout.strategy).message_type(trainer.config.step)
        if name not in kinds:
            return cls()
        info = torch.finfo(kinds[name])
        coarser = unit_roundoff(kinds[name]) / unit_roundoff(torch.float32)
        # Below the smallest normal number, the rounding error no longer shrinks with the number.
        return cls(2 * coarser, info.smallest_normal * info.eps * trainer.layout.world_size)

    def limit_of_norm(self, reference: StepFacts) -> float:
        """Return the relative bound of the norm.

        A norm changes by at most the norm of the change of its vector.
        """
        size = math.sqrt(sum(norm * norm for norm in reference.norms.values()))
        floor_norm = self.floor * reference.scale * math.sqrt(reference.elements)
        moved = self.factor * reference.bound + floor_norm
        return max(SCALAR_TOLERANCE, moved / max(size, 1e-300))


@dataclass(frozen=True)
class Tolerance:
    """The most that rounding may change in a step: gradients, and by them the updated values."""

    learning_rate: float
    messages: MessageRounding
    scale: float  # of the step, as in `StepFacts`

    def of_gradient(self, bound: Tensor | None) -> Tensor | float:
        """Return how far each element of a gradient may be off; 0 where no bound is stored."""
        if bound is None:
            return 0.0
        return bound * self.messages.factor + self.messages.floor * self.scale

    def of_value(
        self, value: Tensor, gradient: Tensor | None, bound: Tensor | None
    ) -> Tensor | float:
        """Return how far each element of an updated value may be off.

        SGD's update moves by rate × bound. Adam's moves by less than 32 × rate × (relative error
        of the gradient's element), for any state: the slope of m̂/√v̂ in g is at most
        (1−β₁)/√(1−β₂)/|g|, times the bias correction. With the rate 1e-3, a gradient of 0.5 that
        may be off by 1e-6 is known to 2e-6 of itself: 1e-3 × (32 × 2e-6 + 1e-6) = 6.5e-8, and the
        rounding of the value.
        """
        if gradient is not None and bound is not None:
            limit = self.of_gradient(bound)
            off = (limit / gradient.abs().clamp(min=1e-300)).clamp(max=1.0)
            rounding = 8 * unit_roundoff(value.dtype) * value.abs()
            return self.learning_rate * (32 * off + limit) + rounding
        if value.is_floating_point():  # it may follow trained ones, as a teacher does
            return 1e-5 * value.abs() + 1e-2 * self.learning_rate
        return 0.0

    def of_buffer(self, buffer: Tensor) -> Tensor | float:
        """Return how far each element of a buffer may be off."""
        return 1e-5 * buffer.abs() + 1e-7 if buffer.is_floating_point() else 0.0


def compare_with_reference(
    placed: ParallelModel,
    gradients: Mapping[str, Tensor],
    stored: Stored,
    tolerance: Tolerance | None,
) -> dict[str, dict[str, TensorDifference]]:
    """Compare this rank's gradients, values and buffers with the reference's.

    Args:
        placed: the model, whose parameters have been updated.
        gradients: those with which the optimizer stepped, by parameter.
        stored: the reference's tensors of the same step.
        tolerance: what rounding may change; None: every bit must be equal.

    Returns:
        Kind of tensor → name → difference.
    """
    compared: dict[str, dict[str, TensorDifference]] = {GRADIENT: {}, VALUE: {}, BUFFER: {}}
    for name, parameter in placed.parameters.items():
        gradient = stored.get(GRADIENT, name)
        bound = stored.get(BOUND, name)
        if name in gradients or gradient is not None:
            allowed = 0.0 if tolerance is None else tolerance.of_gradient(bound)
            compared[GRADIENT][name] = _compare_gradient(gradients.get(name), gradient, allowed)

        value = stored.get(VALUE, name)
        allowed = 0.0
        if tolerance is not None and value is not None:
            allowed = tolerance.of_value(value, gradient, bound)
        compared[VALUE][name] = compare_tensor(parameter.detach(), value, allowed)

    for name, buffer in placed.buffers.items():
        right = stored.get(BUFFER, name)
        allowed = 0.0 if tolerance is None or right is None else tolerance.of_buffer(right)
        compared[BUFFER][name] = compare_tensor(buffer, right, allowed)
    return compared


def compare_first_values(placed: ParallelModel, stored: Stored) -> dict[str, TensorDifference]:
    """Compare the parameters and buffers before the first step, in every bit; by name."""
    parameters = {
        name: compare_tensor(parameter.detach(), stored.get(VALUE, name), 0.0)
        for name, parameter in placed.parameters.items()
    }
    buffers = {
        name: compare_tensor(buffer, stored.get(BUFFER, name), 0.0)
        for name, buffer in placed.buffers.items()
    }
    return parameters | buffers


def _compare_gradient(
    mine: Tensor | None, reference: Tensor | None, allowed: Tensor | float
) -> TensorDifference:
    """Compare a gradient; say of one that is too far off how it relates to the reference's."""
    difference = compare_tensor(mine, reference, allowed)
    if difference.excess <= 1.0 or mine is None or reference is None:
        return difference
    if mine.numel() > _LARGEST_RELATED:
        return difference
    related = relation(local(mine).cpu(), shard_like(reference, mine))
    return replace(difference, relation=related)


def compare_with_float64(
    names: Iterable[str], gradients: dict[str, Tensor], stored: Stored, in_float32: Stored
) -> tuple[dict[str, TensorDifference], str]:
    """Compare gradients with the float64 reference.

    They may be up to four times as far from it as one process is.

    Return the differences; and if one process in float32 is far from the reference too, the reason,
    else "".
    """
    differences = _missing(names, gradients, in_float32)
    for name, mine in gradients.items():
        exact = stored.get(GRADIENT, name)
        one_process = in_float32.get(GRADIENT, name)
        if exact is None or one_process is None:
            return {}, f"the float64 reference has no gradient of {name}"
        rounding = float((one_process.double() - exact).norm())
        if rounding > CEILING * float(exact.norm()):
            return {}, f"the float64 reference computes another gradient of {name}"
        differences[name] = _within_rounding(mine, exact, rounding)
    return differences, ""


def compare_with_perturbed(
    names: Iterable[str], gradients: dict[str, Tensor], perturbed: Stored, reference: Stored
) -> tuple[dict[str, TensorDifference], str]:
    """Compare gradients with the reference within the effect of changed last bits.

    They may differ by up to four times the effect of changing the last bits of parameters.

    Return as `compare_with_float64`; the reason if last bits move the reference so far that they
    would excuse anything.
    """
    differences = _missing(names, gradients, reference)
    moved: dict[str, float] = {}  # parameter → norm of what last bits change in its gradient
    total = 0.0  # squared norm of the reference's gradients
    for name in gradients:
        gradient = reference.get(GRADIENT, name)
        other = perturbed.get(GRADIENT, name)
        if gradient is not None:
            total += float(gradient.double().square().sum())
        if gradient is not None and other is not None:
            moved[name] = float((other.double() - gradient.double()).norm())

    uncertainty = math.sqrt(sum(norm * norm for norm in moved.values()))
    uncertainty /= max(math.sqrt(total), 1e-300)
    if not uncertainty <= CEILING:
        return {}, f"{TOO_FAR} {uncertainty:.0%}"

    for name, mine in gradients.items():
        gradient = reference.get(GRADIENT, name)
        if gradient is None or name not in moved:
            differences[name] = TensorDifference(missing=True)
        else:
            differences[name] = _within_rounding(mine, gradient, moved[name])
    return differences, ""


def _missing(
    names: Iterable[str], gradients: Mapping[str, Tensor], reference: Stored
) -> dict[str, TensorDifference]:
    """Return a difference for each parameter whose gradient the reference has and a rank lacks."""
    return {
        name: TensorDifference(missing=True)
        for name in names
        if name not in gradients and reference.get(GRADIENT, name) is not None
    }


def _within_rounding(mine: Tensor, right: Tensor, rounding: float) -> TensorDifference:
    """Compare a gradient that may be four times as far from the right one as `rounding`, in norm.

    `rounding` is the norm of one process's own difference. With 1e-6, and a right gradient of
    norm 2, 4e-6 + 8 × 6e-8 × 2 = 5e-6 are allowed: a difference of norm 1e-5 has the excess 2.
    """
    difference = compare_tensor(mine, right, 0.0)
    allowed = 4 * rounding + 8 * unit_roundoff(torch.float32) * float(right.double().norm())
    return replace(difference, excess=math.sqrt(difference.square) / max(allowed, 1e-300))
