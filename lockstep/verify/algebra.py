"""Explains how a wrong value comes from the right one, or from its parts.

The right value is the sum of the parts.

Whatever is verified, a gradient is a sum over parts: for a config over micro-batches, for a script
over the ranks' own samples. A reduction that goes wrong leaves another weighted sum of the same
parts, so its weights tell the mistake.

Two ranks, a gradient of three elements. The ranks' own gradients are (2, 0, 4) and (0, 6, 4), and
their mean is right: (1, 3, 4). It is the sum of the parts (1, 0, 2) and (0, 3, 2), and a rank's own
gradient is 2 × its part (the `unit`).

    wrong value on rank 0    weights of the parts    explanation
    (2, 6, 8)                2, 2                    2 × the right one: summed, and not averaged
    (2, 0, 4)                2, 0                    this rank's own sum, not reduced
    (1, 0, 2)                1, 0                    1/2 of this rank's own sum
    (2, 3, 6)                2, 1                    the right one plus this rank's part once more
    (1.3, 2.1, 4)            1.3, 0.7                a sum in which ranks do not weigh alike

Values are NumPy arrays in double precision, so that no mode of torch observes or changes what is
computed here.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Values = NDArray[np.float64]

SAME = 1e-5  # relative difference up to which a relation holds
# relative residual up to which a value is a weighted sum of parts that were computed otherwise
ADDS_UP = 1e-3
# a difference above it is never rounding; what changed last bits move farther can't be judged
CEILING = 1e-2
_SCALED = 2.0**-22  # relative rounding of a float32 that is scaled
_ALIKE = 1e-2  # relative; a value that is farther from the sum over its parts is not that sum
_DEPENDENT = 1e-6  # ratio of singular values below which parts depend on each other
_MOST_PARTS = 32  # number of parts whose weights in a sum are solved for
_SHIFTS = (1, -1, 2, -2)
_TINY = 1e-300  # in place of a norm of 0

# Kinds of a relation.
RELATED = "related"  # to the right value, as the clause says
UNRELATED = "unrelated"
NOT_REDUCED = "not reduced"  # a rank's own sum stands where the sum over ranks should
WRONG_REFERENCE = "wrong reference"  # what is taken for right is not the sum of its parts
OTHER_COUNT = "other count"  # the value is right, and divided by another number of targets


@dataclass(frozen=True)
class Relation:
    """The relation of a wrong value to the right one."""

    clause: str  # without a subject: "is 2 × the reference"
    kind: str = RELATED

    def __str__(self) -> str:
        return self.clause


# ---- one value and another ----


def values_of(tensor: Tensor) -> Values:
    """Return a tensor's values in double precision; complex ones stay complex."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:  # NumPy does not have it
        tensor = tensor.float()
    array: Any = tensor.numpy()
    values: Values = array if tensor.is_complex() else array.astype(np.float64)
    return values


def _values(value: Tensor | Values) -> Values:
    return values_of(value) if isinstance(value, Tensor) else value


def _norm(values: Values) -> float:
    return float(np.linalg.norm(values.ravel()))


def distance(mine: Tensor | Values, right: Tensor | Values) -> float:
    """Return the norm of the difference over the norm of `right`.

    It is infinity where the shapes differ, or a number is not finite.
    """
    if mine.shape != right.shape:
        return math.inf
    a = _values(mine)
    b = _values(right)
    if np.array_equal(a, b):
        return 0.0
    off = _norm(a - b) / max(_norm(b), _TINY)
    return math.inf if math.isnan(off) else off


def factor(mine: Values, right: Values) -> float:
    """Return the number times `right` that is nearest to `mine`; 0 where `right` is 0."""
    size = float(np.vdot(right, right).real)
    return float(np.vdot(right, mine).real) / size if size else 0.0


def multiple(mine: Tensor | Values, right: Tensor | Values) -> float | None:
    """Return the factor between two values if there is one, other than 0 and 1."""
    if mine.shape != right.shape:
        return None
    a = _values(mine)
    b = _values(right)
    times = factor(a, b)
    if times == 0 or abs(times - 1) <= SAME:
        return None
    # A small multiple carries the rounding of what it was computed from.
    allowed = SAME * max(1.0, 1 / abs(times))
    return times if distance(a, b * times) <= allowed else None


def in_words(times: float) -> str:
    """Return `2 ×`, `1/3 of` or `0.37 ×` for a factor."""
    if abs(times - round(times)) <= SAME * abs(times) and round(times):
        return f"{round(times)} ×"
    near = Fraction(times).limit_denominator(64)
    if near and abs(times - float(near)) <= SAME * abs(times):
        return f"{near} of"
    return f"{times:.6g} ×"


def relation(
    mine: Tensor, right: Tensor, others: Iterable[tuple[Relation, Tensor | Values]] = ()
) -> Relation:
    """Return how `mine` relates to the right tensor; without a relation, how far it is off.

    `others` is what it may be instead, each with the relation that it then has.
    """
    a = values_of(mine)
    b = values_of(right)
    if a.shape != b.shape:
        if a.ndim == 2 and distance(a.T, b) <= SAME:
            return Relation("is the reference, transposed")
        return Relation(f"has the shape {list(a.shape)} instead of {list(b.shape)}")
    if not np.isfinite(a).all() and np.isfinite(b).all():
        return Relation("is not finite")
    if not a.any():
        return Relation("is 0")
    for known, other in others:
        if distance(a, other) <= SAME:
            return known
    times = multiple(a, b)
    if times is not None:
        return Relation(f"is {in_words(times)} the reference")
    is_float = mine.is_floating_point()
    offset = _offset(a, b) if a.size > 1 or not is_float else ""
    rounded = _rounded(a, b) if is_float else ""
    clause = offset or _shifted(a, b) or _reordered(a, b) or rounded or _partly_zero(a, b)
    if clause:
        return Relation(clause)
    return Relation(f"differs by {distance(a, b):.1e} of its norm", UNRELATED)


def _offset(a: Values, b: Values) -> str:
    """Return a clause if all elements are larger, or smaller, by one number."""
    offset = (a - b).ravel()
    if not np.all(offset == offset[0]) or not offset[0]:
        return ""
    return f"is the reference {'+' if offset[0] > 0 else '−'} {abs(float(offset[0])):g}"


def _shifted(a: Values, b: Values) -> str:
    """Return a clause if all but the ends agree when the reference is moved along a dim."""
    for dim in range(a.ndim):
        length = a.shape[dim]
        for by in _SHIFTS if length > 2 else ():
            kept = length - abs(by)
            moved = np.take(a, range(max(by, 0), max(by, 0) + kept), dim)
            other = np.take(b, range(max(-by, 0), max(-by, 0) + kept), dim)
            if other.any() and distance(moved, other) <= SAME:
                return f"is the reference shifted by {by} along dim {dim}"
    return ""


def _reordered(a: Values, b: Values) -> str:
    """Return a clause if the elements are the reference's, at other positions."""
    if a.ndim == 2 and a.shape[0] == a.shape[1] and distance(a.T, b) <= SAME:
        return "is the reference, transposed"
    if a.size > 2 and np.array_equal(np.sort(a, axis=None), np.sort(b, axis=None)):
        return "has the reference's values in another order"
    return ""


def _rounded(a: Values, b: Values) -> str:
    """Return a clause if the elements fit into 16 bits, and are near to the reference."""
    for dtype in (torch.bfloat16, torch.float16):
        if np.array_equal(_round_to(dtype, a), a) and distance(a, b) < 0.05:
            return f"is rounded to {str(dtype).removeprefix('torch.')}"
    return ""


def _round_to(dtype: torch.dtype, values: Values) -> Values:
    return values_of(torch.from_numpy(values).to(dtype))


def _partly_zero(a: Values, b: Values) -> str:
    """Return a clause if some elements are 0, and all others are the reference's."""
    zero = (a == 0) & (b != 0)
    if not zero.any() or distance(np.where(zero, 0.0, b), a) > SAME:
        return ""
    return f"is 0 in {int(zero.sum())} of {a.size} elements, else the reference"


# ---- a value and the parts of a sum ----


@dataclass(frozen=True)
class WeightedSum:
    """The weighted sum of parts that is nearest to a value."""

    weights: Values  # of each part
    residual: float  # distance of the sum from the value
    is_unique: bool  # whether no other weights give the same sum


def weighted_sum(parts: Sequence[Values], value: Values) -> WeightedSum:
    """Return the weights with which parts add up to a value, by least squares."""
    columns = np.stack([part.ravel() for part in parts], axis=1)
    solution, _, rank, _ = np.linalg.lstsq(columns, value.ravel(), rcond=_DEPENDENT)
    weights = np.asarray(solution, dtype=np.float64)
    return WeightedSum(
        weights, distance(columns @ weights, value.ravel()), bool(rank == len(parts))
    )


def mean_of(parts: Sequence[Values]) -> Values:
    """Return the mean of values."""
    total: Values = sum(parts, np.zeros_like(parts[0]))
    return total / len(parts)


def explaining_weights(parts: Sequence[Values], value: Values) -> Values | None:
    """Return weights that leave a tenth at most of what the mean of the parts leaves of a value.

    None without any.
    """
    fitted = weighted_sum(parts, value)
    if not fitted.is_unique or fitted.residual > ADDS_UP or min(fitted.weights) < 0:
        return None
    return fitted.weights if fitted.residual <= 0.1 * distance(mean_of(parts), value) else None


OWN = "this rank's own sum"
OTHERS = "the sum of the other ranks"
LAST = "this rank's last micro-batch's"
FIRST = "this rank's first micro-batch's"
PLUS_OWN = "the reference plus this rank's own sum"


@dataclass(frozen=True)
class WrongSum:
    """A wrong result that a reduction leaves on a rank in place of the sum over all parts."""

    what: str  # OWN, OTHERS, LAST, FIRST or PLUS_OWN
    times: float  # by which it is multiplied
    value: Values

    @property
    def relation(self) -> Relation:
        """The relation to the right sum."""
        if self.times != 1:
            return Relation(f"is {in_words(self.times)} {self.what}")
        if self.what == OWN:
            return Relation(f"is {self.what}, {NOT_REDUCED}", NOT_REDUCED)
        return Relation(f"is {self.what}")


def wrong_sums(
    parts: Sequence[Values], mine: Sequence[int], ranks: int, unit: float
) -> Iterator[WrongSum]:
    """Yield what a reduction over ranks that goes wrong may leave on one of them.

    Args:
        parts: their sum is right.
        mine: the positions of this rank's among them.
        ranks: number of ranks.
        unit: factor between what a rank computes and its parts, which a mean over ranks would have
            undone.
    """
    total: Values = sum(parts, np.zeros_like(parts[0]))
    own: Values = sum((parts[position] for position in mine), np.zeros_like(total))
    sums = {OWN: own, OTHERS: total - own}
    if mine:
        sums |= {LAST: parts[mine[-1]], FIRST: parts[mine[0]]}
    for what, each in sums.items():
        if each.any():
            for times in (1.0, float(ranks), 1 / ranks):
                yield WrongSum(what, times, each * (unit * times))
    yield WrongSum(PLUS_OWN, 1.0, total + own)


def reduced_relation(
    gradient: Tensor,
    right: Tensor,
    terms: Mapping[int, Tensor],
    mine: Sequence[int],
    ranks: int,
    unit: float,
    scale: float,
) -> Relation:
    """Return how a reduced gradient relates to the right one.

    Args:
        gradient: on this rank, of the same shape as `right`.
        right: the reference's.
        terms: micro-batch → what it adds; empty if that is not known.
        mine: the micro-batches of this rank.
        ranks: number of ranks.
        unit: factor between this rank's terms and the reference's, which a mean over ranks would
            have undone.
        scale: factor by which the sum was multiplied after its reduction.
    """
    numbers = list(terms)
    parts = [values_of(term) for term in terms.values()]
    wrong: Iterable[WrongSum] = ()
    if parts:
        times = factor(values_of(right), sum(parts, np.zeros_like(parts[0])))
        scaled = [part * times for part in parts]
        wrong = wrong_sums(scaled, [numbers.index(number) for number in mine], ranks, unit)
    related = relation(gradient, right, ((each.relation, each.value) for each in wrong))
    if related.kind != UNRELATED:
        return related
    before = values_of(gradient) / scale
    for dtype in (torch.bfloat16, torch.float16) if gradient.is_floating_point() else ():
        if distance(_round_to(dtype, before), before) <= _SCALED:
            return Relation(
                f"is rounded to {str(dtype).removeprefix('torch.')} before it is scaled to the mean"
            )
    if 1 < len(parts) <= min(_MOST_PARTS, gradient.numel()):
        return (
            _weighed(
                values_of(gradient), values_of(right), dict(zip(numbers, parts, strict=True)), mine
            )
            or related
        )
    return related


def _weighed(
    gradient: Values, right: Values, parts: Mapping[int, Values], mine: Sequence[int]
) -> Relation | None:
    """Return by what each micro-batch weighs in a gradient, if it is a weighted sum of theirs."""
    parts_in_order = list(parts.values())
    mine_weights = weighted_sum(parts_in_order, gradient)
    right_weights = weighted_sum(parts_in_order, right)
    if max(mine_weights.residual, right_weights.residual) > SAME:
        return None
    total: Values = sum(parts_in_order, np.zeros_like(right))
    if distance(total * factor(right, total), right) > _ALIKE:
        shares = dict(
            zip(parts, right_weights.weights / np.abs(right_weights.weights).max(), strict=True)
        )
        return Relation(f"the reference itself weighs {_listed(shares)}", WRONG_REFERENCE)
    weights = {
        number: round(float(a / b), 3) + 0.0
        for number, a, b in zip(parts, mine_weights.weights, right_weights.weights, strict=True)
        if b
    }
    if any(weight == 0 for number, weight in weights.items() if number not in mine):
        return Relation(
            f"weighs {_listed(weights)}: those of other ranks are {NOT_REDUCED}", NOT_REDUCED
        )
    return Relation(f"weighs {_listed(weights)}")


def _listed(weights: Mapping[int, float]) -> str:
    return ", ".join(
        f"micro-batch {number} by {round(weight, 3) + 0.0:g}" for number, weight in weights.items()
    )
