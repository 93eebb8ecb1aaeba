"""Recognises how a wrong tensor relates to the right one: a multiple of it, another micro-batch's, shifted.

A reduced gradient is also compared with sums of what each micro-batch adds to it.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.verify.recorded_flow import ITSELF, NOT_REDUCED

SAME = 1e-5  # relative difference up to which a relation holds
_SHIFTS = (1, -1, 2, -2)
_MOST_TERMS = 32  # micro-batches of a step whose weights in a sum are solved for
_SCALED = 2.0**-22  # relative rounding of a float32 that is scaled
_ALIKE = 1e-2  # relative; a gradient that is farther from the sum over micro-batches is not that sum


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
    """Return a clause on how `mine` relates to the right tensor; without a relation, how far it is off.

    Args:
        others: what it may be instead, by a name.
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
    for dim in range(mine.ndim):
        for by in _SHIFTS:
            if mine.shape[dim] > 2 and _is_shifted(a, b, by, dim):
                return f"is the reference shifted by {by} along dim {dim}"
    if mine.ndim == 2 and mine.shape[0] == mine.shape[1] and distance(a.T, b) <= SAME:
        return "is the reference, transposed"
    if mine.numel() > 2 and torch.equal(a.flatten().sort().values, b.flatten().sort().values):
        return "has the reference's values in another order"
    for dtype in (torch.bfloat16, torch.float16):
        if mine.is_floating_point() and torch.equal(mine.to(dtype).to(mine.dtype), mine) and distance(a, b) < 0.05:
            return f"is rounded to {str(dtype).removeprefix('torch.')}"
    zero = (a == 0) & (b != 0)
    if bool(zero.any()) and distance(torch.where(zero, 0.0, b), a) <= SAME:
        return f"is 0 in {int(zero.sum())} of {mine.numel()} elements, else the reference"
    return f"differs by {distance(a, b):.1e} of its norm"


def _is_shifted(a: Tensor, b: Tensor, by: int, dim: int) -> bool:
    """Return whether all but the ends agree when the reference is moved along a dim."""
    length = a.shape[dim] - abs(by)
    mine, other = a.narrow(dim, max(by, 0), length), b.narrow(dim, max(-by, 0), length)
    return bool(other.any()) and distance(mine, other) <= SAME


def multiple(mine: Tensor, right: Tensor) -> float | None:
    """Return the factor between two tensors if there is one, other than 1."""
    mine, right = mine.detach().double(), right.detach().double()
    size = float((right * right).sum())
    if not size:
        return None
    times = float((mine * right).sum()) / size
    if abs(times - 1) <= SAME or distance(mine, right * times) > SAME * max(1.0, abs(1 / times or 1)):
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
    gradient: Tensor, whole: Tensor, terms: dict[int, Tensor], mine: Sequence[int], ranks: int, unit: float,
    scale: float,
) -> str:  # fmt: skip
    """Return a clause on how a gradient relates to the reference's.

    Args:
        whole: the reference's.
        terms: what each micro-batch adds; empty if that is not known.
        mine: the micro-batches of this rank.
        unit: factor between this rank's terms and the reference's, which a mean over ranks would have undone.
        scale: factor by which the sum was multiplied after its reduction.
    """
    how = relation(gradient, whole, _sums(whole, terms, mine, ranks, unit))
    if not how.startswith("differs"):
        return how
    return _rounded(gradient, scale) or _weights(gradient, whole, terms, mine) or how


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
        return f"{ITSELF} weighs {', '.join(f'micro-batch {m} by {round(share, 3) + 0.0:g}' for m, share in shares)}"
    weights = {m: round(float(a / b), 3) + 0.0 for m, (a, b) in zip(terms, solved.tolist(), strict=True) if b}
    missing = any(weight == 0 for m, weight in weights.items() if m not in mine)
    listed = ", ".join(f"micro-batch {m} by {weight:g}" for m, weight in weights.items())
    return f"weighs {listed}" + (f": those of other ranks are {NOT_REDUCED}" if missing else "")


def _rounded(gradient: Tensor, scale: float) -> str:
    """Return a clause if a gradient was rounded to 16 bits before it was scaled; else ""."""
    before = gradient.detach().double() / scale
    for dtype in (torch.bfloat16, torch.float16):
        if distance(before.to(dtype).double(), before) <= _SCALED:
            return f"is rounded to {str(dtype).removeprefix('torch.')} before it is scaled to the mean"
    return ""


def _sums(whole: Tensor, terms: dict[int, Tensor], mine: Sequence[int], ranks: int, unit: float) -> dict[str, Tensor]:
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
