"""Sums over a first dim whose bits do not depend on how many positions a rank has.

`torch.sum(parts, 0)` takes 32 columns of float32 at a time, and groups the rows of those that are
left over otherwise: of 48 positions the last 16 may have other last bits than among 96. Where
sequences are cut over ranks, or losses are computed by chunks, that number varies.

Tests: tests/models/test_sums.py
"""

from typing import Any

import torch
from torch import Tensor


def sum_in_order(parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the sum over the first dim, [K, …] → […], one part added after another.

    Args:
        dtype: of the sum; unset: that of the parts.
    """
    return _Sum.apply(parts, dtype or parts.dtype)  # type: ignore[no-untyped-call,no-any-return]


def logsumexp_in_order(parts: Tensor) -> Tensor:
    """Return the log of the sum of exponentials over the first dim, [K, …] → […]."""
    top = parts.amax(0)
    top = torch.where(top.isfinite(), top, 0.0)  # else infinity less infinity
    return sum_in_order((parts - top).exp()).log() + top


class _Sum(torch.autograd.Function):
    """Adds; the gradient of each part is that of the sum, of which no copy is made."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the sum."""
        ctx.count = len(parts)
        ctx.dtype = parts.dtype
        total = parts[0].to(dtype, copy=True, memory_format=torch.contiguous_format)
        for part in parts[1:]:
            total += part
        return total

    @staticmethod
    def backward(ctx: Any, *pulls: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the parts."""
        pull = pulls[0].to(ctx.dtype)
        return pull.expand(ctx.count, *pull.shape), None
