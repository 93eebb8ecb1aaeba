"""Defines the chunks of sequences that are cut over the axis `context`, and the messages between its ranks.

The axis is described in `lockstep.parallel.context`.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.parallel.tensor_blocks import SEQUENCE, Cut


class Context(Cut):
    """The way in which sequences are cut.

    Attributes:
        group: the ranks over which; None: one rank, which computes in chunks.
        blocks: chunks in a sequence where bits count; else two for each rank.
        method: how positions of several ranks meet in attention (`lockstep.parallel.context_attention`).
    """

    def __init__(self, group: dist.ProcessGroup | None, blocks: int | None, method: str = "gathered") -> None:
        super().__init__(group, blocks, sequence=True)
        self.method = method

    def order(self, length: int) -> list[int]:
        """Return the numbers of a sequence's chunks, as they are dealt to ranks, a run to each.

        Raises:
            UsageError: ranks can't share the sequence.
        """
        if self.blocks is not None:
            count = math.gcd(length, self.blocks)
        else:
            count = self.ranks if length % (2 * self.ranks) else 2 * self.ranks
        if count % self.ranks or length % count:
            raise UsageError(
                f"{self.ranks} ranks along the axis context can't share a sequence of {length}",
                where="distributed.context_size",
                fix=f"pad sequences to a multiple of {self.blocks or 2 * self.ranks}",
            )
        return [chunk for pair in zip(range(count), reversed(range(count)), strict=True) for chunk in pair][:count]

    def here(self, length: int) -> list[int]:
        """Return the numbers of this rank's chunks of a sequence."""
        order = self.order(length)
        share = len(order) // self.ranks
        return order[self.rank * share : (self.rank + 1) * share]

    def part(self, whole: Tensor, dim: int = SEQUENCE) -> Tensor:
        return self._part_of(self.rank, whole, dim)

    def _part_of(self, rank: int, whole: Tensor, dim: int) -> Tensor:
        order = self.order(whole.shape[dim])
        share, chunks = len(order) // self.ranks, whole.chunk(len(order), dim)
        return torch.cat([chunks[number] for number in order[rank * share : (rank + 1) * share]], dim)

    def gathered(self, part: Tensor, dim: int = SEQUENCE) -> Tensor:
        return self.in_order(part if self.group is None else super().gathered(part, dim), dim)

    def in_order(self, dealt: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks, which lie side by side, as the sequence that they are of."""
        order = self.order(dealt.shape[dim])
        chunks = dict(zip(order, dealt.chunk(len(order), dim), strict=True))
        return torch.cat([chunks[number] for number in range(len(order))], dim)

    def dealt(self, whole: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks side by side."""
        order = self.order(whole.shape[dim])
        chunks = whole.chunk(len(order), dim)
        return torch.cat([chunks[number] for number in order], dim)

    def count_sent(self, parts: Tensor) -> None:
        """Count what is sent if each rank gets one of the parts [ranks, …]."""
        self._count(parts, 1)

    def _in_rows(self, whole: Tensor) -> Tensor:
        parts = [self._part_of(rank, whole, SEQUENCE) for rank in range(self.ranks)]
        return torch.stack(parts).reshape(self.ranks, -1)  # a stack of transposed tensors may be transposed, too

    def spread(self, part: Tensor, count: int) -> tuple[Tensor, ...]:
        """Return a whole sequence for each of `count` chunks of queries; their gradients are summed over all ranks'."""
        return _GatherSequence.apply(part, self, count)  # type: ignore[no-untyped-call,no-any-return]

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of this rank's values [chunks, …], and of the other ranks'."""
        return _Total.apply(values, self)  # type: ignore[no-untyped-call,no-any-return]


class _GatherSequence(torch.autograd.Function):
    """Keys or values [B, H, T / ranks, D] of all ranks, in order, for each chunk of queries."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: Context, count: int) -> tuple[Tensor, ...]:
        ctx.context = context
        whole = context.gathered(part.transpose(1, 2)).transpose(1, 2)
        return tuple(whole.view_as(whole) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        context: Context = ctx.context
        pulls = torch.stack([gradient.transpose(1, 2) for gradient in gradients])
        if context.blocks is None:
            pulls = pulls.sum(0, keepdim=True)
        if context.group is None:
            return context.part(context.sum(pulls)).transpose(1, 2), None, None
        return context.sum(pulls, cut=True).transpose(1, 2), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, context: Context) -> Tensor:
        ctx.count = len(values)
        return context.sum(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].expand(ctx.count, *gradients[0].shape), None
