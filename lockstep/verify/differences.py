"""Measures how far a topology's step is from the reference's: each rank compares its tensors, rank 0 combines them.

Gradients may differ by the rounding of another summation order (`StepObserver.bounds`), and updated values by its
effect on
the optimizer's update; if gradients are sent in 16 bits, also by that rounding. A float64 reference distinguishes
rounding from an error where these bounds are too narrow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lockstep.mesh import local_chunk
from lockstep.parallel.parallel_model import local
from lockstep.strategy import strategy_named
from lockstep.trainer import Trainer
from lockstep.verify.recorded_flow import CEILING, RankFlow
from lockstep.verify.trace import BOUND, BUFFER, GRADIENT, VALUE, StepFacts, StepObserver, Stored, unit_roundoff

# Compared aspects, in the order in which a step computes them: an earlier difference causes the later ones.
ASPECTS = ("start", "samples", "loss", "norm", "gradient", "value", "buffer")
TOO_FAR = "changed last bits of parameters move the gradient of one process by"
SCALAR_TOLERANCE = 1e-6  # relative, of a loss or a norm in plain mode


@dataclass
class TensorDifference:
    """One tensor on one rank, compared with the reference's.

    Attributes:
        excess: largest ratio of an element's difference to its bound; above 1 is too much.
        square: sum of the squared differences.
        missing: the tensor exists on one side only.
    """

    excess: float = 0.0
    square: float = 0.0
    missing: bool = False


@dataclass
class RankReport:
    """Results of one rank in one step.

    Attributes:
        replica: ranks with the same number hold replicas of the same tensors.
        samples: micro-batch → hash, of those that this rank ran.
        fingerprints: parameter → fingerprint of this rank's gradient.
        seed: of this rank's random numbers.
        not_comparable: the reason if the comparison is not meaningful, else "".
        flow: what it found part by part, if that was compared.
        outputs: as in `StepFacts`.
    """

    rank: int
    replica: tuple[int, ...]
    samples: dict[int, str] = field(default_factory=dict)
    loss: float = 0.0
    norm: float = 0.0
    skipped: bool = False
    pieces: dict[str, dict[str, TensorDifference]] = field(default_factory=dict)  # kind → name → difference
    fingerprints: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    not_comparable: str = ""
    flow: RankFlow | None = None
    outputs: list[tuple[str, int]] = field(default_factory=list)


@dataclass
class Difference:
    """One difference in one step.

    Attributes:
        aspect: one of `ASPECTS`.
        name: of the parameter or buffer; for a loss, norm or samples: a description.
        relative: norm of the difference over the norm of the reference.
        excess: largest ratio to the bound; inf if every bit must be equal.
        ranks: ranks with the difference.
    """

    aspect: str
    name: str
    relative: float
    excess: float = math.inf
    ranks: list[int] = field(default_factory=list)
    missing: bool = False


@dataclass
class StepResult:
    """One step of one topology.

    Attributes:
        differences: larger than rounding; by aspect, parameters in the order of the backward pass.
        unsynchronized: parameters whose gradients differ between replicas.
        seeds: rank → seed of its random numbers.
        rounding: largest relative difference of a gradient within its bound.
        same_bits: whether nothing differs at all.
        flows: what each rank found part by part, if that was compared.
        outputs: of each rank, as in `StepFacts`.
        module: where positions of a cut sequence meet outside of attention (`lockstep.verify.positions`).
    """

    step: int
    differences: list[Difference] = field(default_factory=list)
    unsynchronized: list[str] = field(default_factory=list)
    seeds: dict[int, int] = field(default_factory=dict)
    rounding: float = 0.0
    same_bits: bool = True
    fingerprints: dict[str, int] = field(default_factory=dict)
    flows: list[RankFlow] = field(default_factory=list)
    outputs: list[list[tuple[str, int]]] = field(default_factory=list)
    module: str = ""

    def has(self, *aspects: str) -> bool:
        """Return whether one of the aspects differs."""
        return any(d.aspect in aspects for d in self.differences)

    def distance(self, aspect: str) -> float:
        """Return the largest relative difference in an aspect; 0 if all are within bounds."""
        return max((math.inf if d.missing else d.relative for d in self.differences if d.aspect == aspect), default=0.0)

    @property
    def first(self) -> Difference | None:
        """The first difference in the order of `ASPECTS`."""
        return min(self.differences, key=lambda d: ASPECTS.index(d.aspect), default=None)


@torch.no_grad()
def compare_tensor(mine: Tensor | None, reference: Tensor | None, allowed: Tensor | float) -> TensorDifference:
    """Compare a tensor, whole or a rank's shard, with the reference's whole tensor.

    Args:
        allowed: bound of each element's difference; a tensor of the reference's shape, or 0 for equal bits.
    """
    if mine is None or reference is None:
        return TensorDifference(
            missing=(mine is None) != (reference is None), excess=math.inf if mine is not reference else 0.0
        )
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
        excess = torch.where(off > allowed, math.inf, 0.0) if allowed else torch.full_like(off, math.inf)
    return TensorDifference(float(excess.max()) if excess.numel() else 0.0, float(off.square().sum()))


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


def combine_reports(
    step: int, reports: Sequence[RankReport], reference: "Expected", *, exact: bool
) -> StepResult:  # fmt: skip
    """Combine all ranks' reports of one step.

    Args:
        exact: whether every bit counts; else differences within the bounds are rounding.
    """
    result = StepResult(step, seeds={report.rank: report.seed for report in reports})
    result.flows = [report.flow for report in reports if report.flow is not None]
    result.outputs = [report.outputs for report in reports]
    result.differences += _samples(reports, reference.samples)
    for aspect, limit in (("loss", SCALAR_TOLERANCE), ("norm", reference.norm_limit)):
        result.differences += _scalar(aspect, reports, getattr(reference, aspect), 0.0 if exact else limit)
    skipped = [report.rank for report in reports if report.skipped != reference.skipped]
    if skipped:
        result.differences.append(Difference("norm", "the update was skipped", math.inf, ranks=skipped))
    for kind in ("start", "gradient", "value", "buffer"):
        for name in _backward_order(reports, kind, reference.order):
            pieces = {r.rank: r.pieces[kind][name] for r in reports if name in r.pieces.get(kind, {})}
            relative = math.sqrt(max(p.square for p in pieces.values())) / max(reference.norms.get(name, 1.0), 1e-300)
            worst = max(p.excess for p in pieces.values())
            missing = any(p.missing for p in pieces.values())
            result.same_bits &= worst == 0.0
            if worst > 1.0 or missing:
                ranks = sorted(rank for rank, p in pieces.items() if p.excess > 1.0 or p.missing)
                result.differences.append(Difference(kind, name, relative, worst, ranks, missing))
            elif kind == "gradient":
                result.rounding = max(result.rounding, relative)
    result.same_bits &= not result.differences
    result.unsynchronized = _differing_between_replicas(reports)
    for report in reports:
        for name, value in report.fingerprints.items():
            result.fingerprints[name] = result.fingerprints.get(name, 0) + value
    return result


@dataclass
class Expected:
    """The reference's step without its tensors; the norm may differ by `norm_limit`, relatively."""

    samples: Mapping[int, str]
    loss: float
    norm: float
    skipped: bool
    norms: Mapping[str, float]
    order: Sequence[str]  # parameters in the model's order
    norm_limit: float = SCALAR_TOLERANCE


def _samples(reports: Sequence[RankReport], expected: Mapping[int, str]) -> list[Difference]:
    seen: dict[int, str] = {}
    doubled = []
    for report in reports:
        for index, text in report.samples.items():
            if seen.setdefault(index, text) != text:
                doubled.append(index)
    wrong = [index for index in expected if index in seen and seen[index] != expected[index]]
    if not wrong and not doubled and len(seen) == len(expected):
        return []
    if sorted(seen.values()) == sorted(expected.values()) and not doubled:
        what = "the same micro-batches in another order"
    elif len(seen) != len(expected):
        what = f"{len(seen)} micro-batches instead of {len(expected)}"
    elif doubled:
        what = f"ranks do not agree on micro-batch {doubled[0]}"
    else:
        what = f"{len(wrong)} of {len(expected)} micro-batches hold other samples, the first of them is {wrong[0]}"
    ranks = sorted({r.rank for r in reports for i, text in r.samples.items() if expected.get(i) != text})
    return [Difference("samples", what, math.inf, ranks=ranks)]


def _scalar(aspect: str, reports: Sequence[RankReport], expected: float, limit: float) -> list[Difference]:
    found = {report.rank: getattr(report, aspect) for report in reports}
    off = {
        rank: abs(value - expected) / max(abs(expected), 1e-300)
        for rank, value in found.items()
        if value != expected and not (math.isnan(value) and math.isnan(expected))
    }
    ranks = sorted(rank for rank, relative in off.items() if not relative <= limit)
    if not ranks:
        return []
    text = f"{found[ranks[0]]:.9g} instead of {expected:.9g}"
    return [Difference(aspect, text, off[ranks[0]], off[ranks[0]] / limit if limit else math.inf, ranks)]


def _backward_order(reports: Sequence[RankReport], kind: str, order: Sequence[str]) -> list[str]:
    names = {name for report in reports for name in report.pieces.get(kind, {})}
    known = [name for name in reversed(order) if name in names]
    return known + sorted(names - set(known))


def _differing_between_replicas(reports: Sequence[RankReport]) -> list[str]:
    """Return the parameters whose gradients differ between replicas."""
    held: dict[tuple[tuple[int, ...], str], set[int]] = {}
    for report in reports:
        for name, value in report.fingerprints.items():
            held.setdefault((report.replica, name), set()).add(value)
    return sorted({name for (_, name), values in held.items() if len(values) > 1})


@dataclass(frozen=True)
class MessageRounding:
    """Effect of the type in which gradients are sent: bounds become `factor` × bound + `floor` × the step's scale."""

    factor: float = 1.0
    floor: float = 0.0


def message_rounding(trainer: Trainer) -> MessageRounding:
    """Return it for a trainer's strategy."""
    kinds = {"fp16": torch.float16, "bf16": torch.bfloat16}
    name = strategy_named(trainer.layout.strategy).message_type(trainer.config.step)
    if name not in kinds:
        return MessageRounding()
    info = torch.finfo(kinds[name])
    coarser = unit_roundoff(kinds[name]) / unit_roundoff(torch.float32)
    # Below the smallest normal number, the rounding error no longer shrinks with the number.
    return MessageRounding(2 * coarser, info.smallest_normal * info.eps * trainer.layout.world_size)


def limit_of_norm(reference: StepFacts, rounding: MessageRounding) -> float:
    """Return the relative bound of the norm: it changes by at most the norm of the change of its vector."""
    size = math.sqrt(sum(norm * norm for norm in reference.norms.values()))
    moved = rounding.factor * reference.bound + rounding.floor * reference.scale * math.sqrt(reference.elements)
    return max(SCALAR_TOLERANCE, moved / max(size, 1e-300))


def compare_with_reference(
    trainer: Trainer, stored: Stored, observer: StepObserver | None = None, *, rate: float | None = None,
    exact: bool = True, factor: float = 1.0, floor: float = 0.0,
) -> dict[str, dict[str, TensorDifference]]:  # fmt: skip
    """Compare this rank's tensors with the reference's.

    Args:
        stored: the reference's tensors.
        observer: this rank's gradients.
        rate: the learning rate; unset: updated values must be equal.
        exact: whether every bit must be equal.
        factor, floor: bounds of gradients become factor × bound + floor.
    """
    placed = trainer.placed
    found: dict[str, dict[str, TensorDifference]] = {GRADIENT: {}, VALUE: {}, BUFFER: {}}
    for name, parameter in placed.parameters.items():
        value, gradient, bound = (stored.get(kind, name) for kind in (VALUE, GRADIENT, BOUND))
        bound = bound if bound is None else bound * factor + floor
        if observer is not None and (name in observer.gradients or gradient is not None):
            allowed: Tensor | float = 0.0 if exact or bound is None else bound
            found[GRADIENT][name] = compare_tensor(observer.gradients.get(name), gradient, allowed)
        allowed = 0.0
        if rate is not None and value is not None:
            if bound is not None and gradient is not None:
                allowed = _bound_of_value(value, gradient, bound, rate)
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
    gradients: dict[str, Tensor], stored: Stored, in_float32: Stored
) -> tuple[dict[str, TensorDifference], str]:
    """Compare gradients with the float64 reference: up to four times as far from it as one process is.

    Returns:
        the differences; and if one process in float32 is far from the reference too, the reason, else "".
    """
    found = {}
    for name, mine in gradients.items():
        true, single = stored.get(GRADIENT, name), in_float32.get(GRADIENT, name)
        if true is None or single is None:
            return {}, f"the float64 reference has no gradient of {name}"
        own, size = float((single.double() - true).norm()), float(true.norm())
        if own > CEILING * size:
            return {}, f"the float64 reference computes another gradient of {name}"
        piece = compare_tensor(mine, true, 0.0)
        piece.excess = math.sqrt(piece.square) / max(4 * own + 8 * unit_roundoff(torch.float32) * size, 1e-300)
        found[name] = piece
    return found, ""


def compare_with_perturbed(
    gradients: dict[str, Tensor], perturbed: Stored, reference: Stored
) -> tuple[dict[str, TensorDifference], str]:
    """Compare gradients with the reference: up to four times the effect of changed last bits of parameters.

    Returns:
        the differences; and if last bits move the reference so far that they would excuse anything, why, else "".
    """
    pairs = {name: (perturbed.get(GRADIENT, name), reference.get(GRADIENT, name)) for name in gradients}
    moved = {
        name: float((a.double() - b.double()).norm())
        for name, (a, b) in pairs.items()
        if a is not None and b is not None
    }
    whole = math.sqrt(sum(float(b.double().square().sum()) for _, b in pairs.values() if b is not None))
    uncertain = math.sqrt(sum(own * own for own in moved.values())) / max(whole, 1e-300)
    if not uncertain <= CEILING:
        return {}, f"{TOO_FAR} {uncertain:.0%}"
    found = {}
    for name, mine in gradients.items():
        single = pairs[name][1]
        if single is None or name not in moved:
            found[name] = TensorDifference(missing=True)
            continue
        own, size = moved[name], float(single.double().norm())
        piece = compare_tensor(mine, single, 0.0)
        piece.excess = math.sqrt(piece.square) / max(4 * own + 8 * unit_roundoff(torch.float32) * size, 1e-300)
        found[name] = piece
    return found, ""


def _bound_of_value(value: Tensor, gradient: Tensor, bound: Tensor, rate: float) -> Tensor:
    """Return how far an updated value may differ if its gradient may differ by `bound`.

    SGD's update moves by rate × bound. Adam's moves by less than 32 × rate × (relative error of the gradient's
    element), for any state: the slope of m̂/√v̂ in g is at most (1−β₁)/√(1−β₂)/|g|, times the bias correction.
    """
    relative = (bound / gradient.abs().clamp(min=1e-300)).clamp(max=1.0)
    return rate * (32 * relative + bound) + 8 * unit_roundoff(value.dtype) * value.abs()
