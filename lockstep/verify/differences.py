"""How far a topology's step is from the reference's: each rank compares what it holds, rank 0 puts it together."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from lockstep.mesh import local_chunk
from lockstep.parallel.parallel_model import local

# What is compared, in the order in which a step makes it: an earlier difference causes the later ones.
ASPECTS = ("start", "samples", "loss", "norm", "gradient", "value", "buffer")
SCALAR_TOLERANCE = 1e-6  # relative, of a loss or a norm in plain mode


@dataclass
class Piece:
    """One tensor on one rank against the reference's.

    Attributes:
        excess: largest difference of an element over what is allowed; above 1 is too much.
        square: of the differences, summed.
        missing: one of the two has no such tensor.
    """

    excess: float = 0.0
    square: float = 0.0
    missing: bool = False


@dataclass
class Report:
    """What one rank found in one step.

    Attributes:
        replica: ranks with the same number hold replicas of the same things.
        samples: micro-batch → hash, of those that this rank ran.
        prints: parameter → fingerprint of its gradient here.
        seed: of its random numbers.
        useless: why the comparison means nothing, where it does not.
    """

    rank: int
    replica: tuple[int, ...]
    samples: dict[int, str] = field(default_factory=dict)
    loss: float = 0.0
    norm: float = 0.0
    skipped: bool = False
    pieces: dict[str, dict[str, Piece]] = field(default_factory=dict)  # kind → name → piece
    prints: dict[str, int] = field(default_factory=dict)
    seed: int = 0
    useless: str = ""


@dataclass
class Difference:
    """One thing that differs in one step.

    Attributes:
        aspect: one of `ASPECTS`.
        name: of the parameter or buffer; of a loss, norm or samples: what is shown.
        relative: norm of the difference over the norm of the reference.
        excess: over what is allowed, of the worst element; inf where nothing may differ.
        ranks: where it differs.
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
        differences: too large to be rounding; by aspect, parameters in the order of the backward pass.
        apart: parameters whose gradients differ between replicas.
        seeds: rank → seed of its random numbers.
        rounding: largest relative difference of a gradient that was allowed.
        same_bits: nothing differs at all.
    """

    step: int
    differences: list[Difference] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    seeds: dict[int, int] = field(default_factory=dict)
    rounding: float = 0.0
    same_bits: bool = True
    prints: dict[str, int] = field(default_factory=dict)

    def has(self, *aspects: str) -> bool:
        return any(d.aspect in aspects for d in self.differences)

    def distance(self, aspect: str) -> float:
        """The largest relative difference in one aspect; 0: none that is too large."""
        return max((math.inf if d.missing else d.relative for d in self.differences if d.aspect == aspect), default=0.0)

    @property
    def first(self) -> Difference | None:
        return min(self.differences, key=lambda d: ASPECTS.index(d.aspect), default=None)


@torch.no_grad()
def compared(mine: Tensor | None, reference: Tensor | None, allowed: Tensor | float) -> Piece:
    """One tensor, whole or a rank's piece of it, against the reference's whole one.

    Args:
        allowed: how far each element may be off; a tensor of the reference's shape, or 0 for equal bits.
    """
    if mine is None or reference is None:
        return Piece(missing=(mine is None) != (reference is None), excess=math.inf if mine is not reference else 0.0)
    piece, target = local(mine).detach().cpu(), _cut_like(reference, mine)
    if piece.shape != target.shape:
        return Piece(math.inf, math.inf)
    if torch.equal(_bits(piece), _bits(target)):
        return Piece()
    off = (piece.double() - target.double()).abs()
    off = torch.where(piece == target, 0.0, off).nan_to_num(nan=math.inf)
    if isinstance(allowed, Tensor):
        limit = _cut_like(allowed, mine).double()
        excess = torch.where(off > 0, off / limit.clamp(min=1e-300), 0.0)
    else:
        excess = torch.where(off > allowed, math.inf, 0.0) if allowed else torch.full_like(off, math.inf)
    return Piece(float(excess.max()) if excess.numel() else 0.0, float(off.square().sum()))


def _bits(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous().reshape(-1)
    return tensor.view(torch.uint8) if tensor.numel() else tensor


def _cut_like(whole: Tensor, mine: Tensor) -> Tensor:
    if isinstance(mine, DTensor):
        mesh, coordinate = mine.device_mesh, mine.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis, placement in enumerate(mine.placements):
            if isinstance(placement, Shard):
                whole = local_chunk(whole, placement.dim, mesh.size(axis), coordinate[axis])
    return whole


def put_together(
    step: int, reports: Sequence[Report], reference: "Expected", *, exact: bool
) -> StepResult:  # fmt: skip
    """All ranks' reports of one step, against the reference.

    Args:
        exact: every bit counts; else what lies within the bounds is rounding.
    """
    result = StepResult(step, seeds={report.rank: report.seed for report in reports})
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
    result.apart = _apart(reports)
    for report in reports:
        for name, value in report.prints.items():
            result.prints[name] = result.prints.get(name, 0) + value
    return result


@dataclass
class Expected:
    """The reference's step, without its tensors; the norm may be off by `norm_limit`, relatively."""

    samples: Mapping[int, str]
    loss: float
    norm: float
    skipped: bool
    norms: Mapping[str, float]
    order: Sequence[str]  # parameters as the model lists them
    norm_limit: float = SCALAR_TOLERANCE


def _samples(reports: Sequence[Report], expected: Mapping[int, str]) -> list[Difference]:
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


def _scalar(aspect: str, reports: Sequence[Report], expected: float, limit: float) -> list[Difference]:
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


def _backward_order(reports: Sequence[Report], kind: str, order: Sequence[str]) -> list[str]:
    names = {name for report in reports for name in report.pieces.get(kind, {})}
    known = [name for name in reversed(order) if name in names]
    return known + sorted(names - set(known))


def _apart(reports: Sequence[Report]) -> list[str]:
    """Parameters whose gradients are not the same on all replicas."""
    held: dict[tuple[tuple[int, ...], str], set[int]] = {}
    for report in reports:
        for name, value in report.prints.items():
            held.setdefault((report.replica, name), set()).add(value)
    return sorted({name for (_, name), values in held.items() if len(values) > 1})
