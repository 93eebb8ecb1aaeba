"""Computes attention to the strict past that is linear in its values, tril(q qᵀ, −1) x, in two equal forms.

Direct: the T × T table of scores, half of which is discarded: 2·T·(N + D) multiply-adds per position and head.
Chunked: the same within a chunk of C positions; all earlier positions enter through their sum Σ qᵀx, [N, D]:
2·C·(N + D) + 4·N·D multiply-adds for any T, and no table. Backward keeps only q and x: it computes the same sum
again, and the gradient of the sum in reverse.

Source: the chunkwise form of linear attention, Katharopoulos et al. 2020 and Yang et al. 2023, with one tensor as
queries and keys and the diagonal left out.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 128  # positions


def sum_over_past(q: Tensor, x: Tensor) -> Tensor:
    """Return tril(q qᵀ, −1) x by the form with fewer multiply-adds: q [R, T, N], x [R, T, D] → [R, T, D]."""
    length, neurons, width = q.shape[1], q.shape[2], x.shape[2]
    if length * (neurons + width) <= CHUNK * (neurons + width) + 2 * neurons * width:
        return direct(q, x)
    return chunked(q, x)


def direct(q: Tensor, x: Tensor) -> Tensor:
    """Compute the table of all scores."""
    return torch.bmm(torch.bmm(q, q.transpose(1, 2)).tril(-1), x)


def chunked(q: Tensor, x: Tensor, chunk: int = CHUNK) -> Tensor:
    """Compute chunk by chunk; sums over chunks are in float32 at least."""
    result: Tensor = _Chunked.apply(q, x, chunk)  # type: ignore[no-untyped-call]
    return result


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, x: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(q, x)
        ctx.chunk = chunk
        past = _PastSum(q.dtype)
        pieces = []
        for q_here, x_here in zip(torch.split(q, chunk, 1), torch.split(x, chunk, 1), strict=True):
            pieces.append(direct(q_here, x_here) + past.through(q_here))
            past.add(q_here, x_here)
        return torch.cat(pieces, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        """Return gradients for o = tril(q qᵀ, −1) x + q S and S' = S + qᵀx in each chunk, with g the gradient of o."""
        q, x = ctx.saved_tensors
        pieces = list(zip(*(torch.split(whole, ctx.chunk, 1) for whole in (q, x, gradients[0])), strict=True))
        to_q, to_x, past, later = [], [], _PastSum(q.dtype), _PastSum(q.dtype)
        for q_here, x_here, g_here in pieces:
            scores = torch.bmm(g_here, x_here.transpose(1, 2)).tril(-1)
            to_q.append(torch.bmm(scores + scores.transpose(1, 2), q_here) + past.through_transposed(g_here))
            past.add(q_here, x_here)
        for place in reversed(range(len(pieces))):
            q_here, x_here, g_here = pieces[place]
            scores = torch.bmm(q_here, q_here.transpose(1, 2)).tril(-1)
            to_x.append(torch.bmm(scores.transpose(1, 2), g_here) + later.through(q_here))
            to_q[place] += later.through_transposed(x_here)
            later.add(q_here, g_here)
        return torch.cat(to_q, 1), torch.cat(to_x[::-1], 1), None


class _PastSum:
    """The sum Σ qᵀy over the chunks so far, [R, N, D]; empty before the first.

    Args:
        dtype: of q and y, and of the products with the sum.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype, self._kept = dtype, torch.promote_types(dtype, torch.float32)
        self._sum: Tensor | None = None

    def add(self, q: Tensor, y: Tensor) -> None:
        if self._sum is None:
            self._sum = torch.bmm(q.transpose(1, 2), y).to(self._kept)
        elif self._dtype == self._kept:
            self._sum.baddbmm_(q.transpose(1, 2), y)
        else:
            self._sum += torch.bmm(q.transpose(1, 2), y)

    def through(self, q: Tensor) -> Tensor | float:
        """Return q S, [R, chunk, D]."""
        return 0.0 if self._sum is None else torch.bmm(q, self._sum.to(self._dtype))

    def through_transposed(self, y: Tensor) -> Tensor | float:
        """Return y Sᵀ, [R, chunk, N]."""
        return 0.0 if self._sum is None else torch.bmm(y, self._sum.to(self._dtype).transpose(1, 2))
