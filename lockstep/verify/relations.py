"""Recognises how a wrong tensor relates to the right one: a multiple of it, another micro-batch's, shifted."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAME = 1e-5  # relative difference up to which a relation holds
_SHIFTS = (1, -1, 2, -2)


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
