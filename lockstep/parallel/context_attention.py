"""Attention over sequences that are cut over the axis `context` (`lockstep.parallel.context`), in three ways.

    gathered     each rank gathers keys and values, and its queries attend (Llama 3, arXiv:2407.21783, section 3.3.2)
    all_to_all   each rank gives away its part of most heads for the whole sequence of some (Jacobs et al. 2023,
                 DeepSpeed-Ulysses, arXiv:2309.14509); they attend, and travel back
    ring         keys and values travel from rank to rank (`lockstep.parallel.context_ring`)

Where bits count, the first two compute the same: queries chunk by chunk, and the gradients of keys and values as one
tree over the chunks of queries. Heads are independent of each other.
"""

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.models.attention import Attend
from lockstep.parallel.context_chunks import Context
from lockstep.parallel.context_ring import ring_attention

_POSITIONS = 2  # the dim of queries, keys and values along which positions lie


def cut_attention(module: Attend, context: Context) -> None:
    """Let an `Attend` run on this rank's part of sequences.

    Raises:
        UsageError: it attends in a way that the method can't compute.
    """
    if context.method == "ring" and type(module).run is not Attend.run:
        raise UsageError(
            f"context_method: ring can't compute {type(module).__name__}",
            where="distributed.context_method",
            why="it merges the softmax of several ranks, and this attends in a way of its own",
            fix="write context_method: gathered or all_to_all",
        )
    plain, alone = type(module).positions, Context(None, context.blocks)

    def positions(self: Attend, length: int, device: torch.device, documents: Tensor | None = None) -> Tensor:
        if context.whole:
            return plain(self, length, device, documents)
        return context.part(plain(self, length * context.ranks, device, documents), 0 if documents is None else 1)

    def forward(self: Attend, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None) -> Tensor:
        if context.whole:
            return self.run(q, k, v, 0, documents)
        if context.group is None or context.method == "gathered":
            return _gathered(self, q, k, v, documents, context)
        if context.method == "ring":
            return ring_attention(q, k, v, documents, context, causal=self.causal)
        _check_heads(q, k, self.heads_dim, context.ranks)
        q, k, v = (_to_heads(each, self.heads_dim, context) for each in (q, k, v))
        if context.blocks is not None:
            attended = _gathered(self, q, k, v, documents, alone)
        else:
            q, k, v = (context.in_order(each, _POSITIONS) for each in (q, k, v))
            attended = context.dealt(self.run(q, k, v, 0, documents), _POSITIONS)
        return _to_positions(attended, self.heads_dim, context)

    module.positions = MethodType(positions, module)  # type: ignore[method-assign]
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _gathered(attend: Attend, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, context: Context) -> Tensor:
    numbers = context.here(q.shape[_POSITIONS] * context.ranks)
    size, count = q.shape[_POSITIONS] // len(numbers), len(numbers)
    queries, keys, values = q.chunk(count, _POSITIONS), context.spread(k, count), context.spread(v, count)
    attended = []
    for place, number in enumerate(numbers):
        last = (number + 1) * size if attend.causal else k.shape[_POSITIONS] * context.ranks
        seen = keys[place][:, :, :last], values[place][:, :, :last]
        attended.append(attend.run(queries[place], *seen, number * size, documents))
    return torch.cat(attended, _POSITIONS)


def _check_heads(q: Tensor, k: Tensor, dim: int, ranks: int) -> None:
    if q.shape[dim] % ranks or k.shape[dim] % ranks:
        raise UsageError(
            f"{q.shape[dim]} heads of queries and {k.shape[dim]} of keys and values can't be exchanged between {ranks} "
            "ranks along the axis context",
            where="distributed.context_method",
            why="each rank gets whole heads",
            fix="write context_method: gathered, or a context_size that divides both numbers",
        )


def _to_heads(x: Tensor, heads_dim: int, context: Context) -> Tensor:
    """Return the whole sequence of this rank's heads for a part of the sequence of all heads."""
    return _ExchangeHeads.apply(x, heads_dim, _POSITIONS, context)  # type: ignore[no-untyped-call,no-any-return]


def _to_positions(x: Tensor, heads_dim: int, context: Context) -> Tensor:
    """Return this rank's part of the sequence of all heads for the whole sequence of some."""
    return _ExchangeHeads.apply(x, _POSITIONS, heads_dim, context)  # type: ignore[no-untyped-call,no-any-return]


class _ExchangeHeads(torch.autograd.Function):
    """Parts along one dim, given away to all ranks, for all ranks' parts along another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, given: int, taken: int, context: Context) -> Tensor:
        ctx.given, ctx.taken, ctx.context = given, taken, context
        return _exchanged(x, given, taken, context)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(gradients[0], ctx.taken, ctx.given, ctx.context), None, None, None


def _exchanged(x: Tensor, given: int, taken: int, context: Context) -> Tensor:
    parts = torch.stack(x.chunk(context.ranks, given))
    theirs = torch.empty_like(parts)
    context.count_sent(parts)
    dist.all_to_all_single(theirs, parts, group=context.group)
    return torch.cat(theirs.unbind(), taken)
