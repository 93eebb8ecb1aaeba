"""Defines the chunks of sequences that are cut over the axis `context`, and the messages between its ranks.

The axis is described in `lockstep.parallel.context`.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.parallel.tensor_blocks import SEQUENCE, Cut, with_backward


class Context(Cut):
    """The way in which sequences are cut: `blocks` chunks in each where bits count, else two for each rank.

    `method`: how positions of several ranks meet in attention (`lockstep.parallel.context_attention`).
    """

    def __init__(self, group: dist.ProcessGroup | None, blocks: int | None, method: str = "gathered") -> None:
        super().__init__(group, blocks, sequence=True)
        self.method = method

    def order(self, length: int) -> list[int]:
        """Return the numbers of a sequence's chunks, as they are dealt to ranks, a run to each."""
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
        order = self.order(length)
        share = len(order) // self.ranks
        return order[self.rank * share : (self.rank + 1) * share]

    def part(self, whole: Tensor, dim: int = SEQUENCE) -> Tensor:
        chunks = whole.chunk(len(self.order(whole.shape[dim])), dim)
        return torch.cat([chunks[number] for number in self.here(whole.shape[dim])], dim)

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

    def rows_of_ranks(self, whole: Tensor) -> Tensor:
        return super().rows_of_ranks(self.dealt(whole, SEQUENCE))

    def spread(self, part: Tensor, count: int) -> tuple[Tensor, ...]:
        """Return keys or values [B, H, T / ranks, D] of all ranks, in order, for each of `count` chunks of queries.

        Their gradients are summed over all ranks' chunks.
        """

        def run(part: Tensor) -> tuple[Tensor, ...]:
            whole = self.gathered(part.transpose(1, 2)).transpose(1, 2)
            return tuple(whole.view_as(whole) for _ in range(count))

        def pull_back(*gradients: Tensor) -> Tensor:
            pulls = torch.stack([gradient.transpose(1, 2) for gradient in gradients])
            if self.blocks is None:
                pulls = pulls.sum(0, keepdim=True)
            mine = self.part(self.sum(pulls)) if self.group is None else self.sum(pulls, cut=True)
            return mine.transpose(1, 2)

        return with_backward(run, pull_back, part)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum of this rank's values [chunks, …], and of the other ranks'."""
        count = len(values)
        return with_backward(self.sum, lambda pull: pull.expand(count, *pull.shape), values)
