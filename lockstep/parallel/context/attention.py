"""Attention over the axis `context`, whose ranks hold chunks of sequences.

Chunks are cut in `lockstep.parallel.context.sequences`. Attention has three ways. Two ranks share a
sequence of 8 tokens, four each, with q, k and v of [B, H, 4, D] on either:

`gathered` (Llama 3, arXiv:2407.21783, section 3.3.2): keys and values of all tokens, [B, H, 8, D],
come to every rank, and each chunk of two queries attends to those up to its own end. Queries stay.

`all_to_all` (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509): a rank gives away half of
the heads for the other half of the tokens, [B, H, 4, D] → [B, H / 2, 8, D], attends as one process
does, and takes back [B, H, 4, D].

`ring` (Liu et al. 2023, arXiv:2310.01889): keys and values go round, and no rank has all of them at
a time. A rank attends to its own, then to those that come, and merges the results by their
log-sum-exp. One query of width 1, with the scores 0, log 3, log 3, 0 and the values 1, 6, 6, 3 at
positions 0 to 3; rank 0 has positions 0 and 3, rank 1 positions 1 and 2:

                           rank 0                      rank 1
    weights of its keys    1 and 1                     3 and 3
    sum of the weights     2                           6
    mean of its values     (1 + 3) / 2 = 2             (18 + 18) / 6 = 6
    merged, on each        (2 · 2 + 6 · 6) / (2 + 6) = 5

Where bits count, the first two compute the same: queries chunk by chunk, and the gradients of keys
and values as one tree over the chunks of queries. The ring adds up in the order in which keys come,
which is another one on each rank.

Tests: tests/parity/test_context.py, tests/models/test_documents.py,
tests/parallel/test_worked_examples.py
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.models.attention import Attend
from lockstep.parallel.changes import replace_method
from lockstep.parallel.tensor.layer_cut import SEQUENCE, LayerCut, OnSend, with_backward


class SequenceCut(LayerCut):
    """The cut of each sequence: `blocks` chunks where bits count, else two chunks for each rank."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        blocks: int | None,
        method: str = "gathered",
        on_send: OnSend | None = None,
    ) -> None:
        super().__init__(group, blocks, sequence=True, on_send=on_send)
        self.method = method

    def order(self, length: int) -> list[int]:
        """Return the numbers of a sequence's chunks in the order in which ranks get them.

        Four chunks on two ranks: [0, 3, 1, 2], so rank 0 has chunks 0 and 3, rank 1 has 1 and 2.
        """
        if self.blocks is not None:
            count = math.gcd(length, self.blocks)
        else:
            # Without 2 · ranks equal chunks each rank gets one, and causal work is uneven.
            count = self.ranks if length % (2 * self.ranks) else 2 * self.ranks
        if count % self.ranks or length % count:
            what = f"{self.ranks} ranks along the axis context can't share a sequence of {length}"
            fix = f"pad sequences to a multiple of {self.blocks or 2 * self.ranks}"
            raise UsageError(what, where="distributed.context_size", fix=fix)
        return [
            chunk
            for pair in zip(range(count), reversed(range(count)), strict=True)
            for chunk in pair
        ][:count]

    def here(self, length: int) -> list[int]:
        """Return the numbers of this rank's chunks of a sequence."""
        order = self.order(length)
        share = len(order) // self.ranks
        return order[self.rank * share : (self.rank + 1) * share]

    def part(self, full: Tensor, dim: int = SEQUENCE) -> Tensor:
        """Return this rank's chunks of complete sequences, one after the other."""
        chunks = full.chunk(len(self.order(full.shape[dim])), dim)
        return torch.cat([chunks[number] for number in self.here(full.shape[dim])], dim)

    def gathered(self, part: Tensor, dim: int = SEQUENCE) -> Tensor:
        """Return complete sequences, from the parts of all ranks."""
        return self.in_order(part if self.group is None else super().gathered(part, dim), dim)

    def in_order(self, dealt: Tensor, dim: int) -> Tensor:
        """Return complete sequences from the parts of all ranks, which lie side by side."""
        order = self.order(dealt.shape[dim])
        chunks = dict(zip(order, dealt.chunk(len(order), dim), strict=True))
        return torch.cat([chunks[number] for number in range(len(order))], dim)

    def dealt(self, full: Tensor, dim: int) -> Tensor:
        """Return the parts of all ranks side by side."""
        order = self.order(full.shape[dim])
        chunks = full.chunk(len(order), dim)
        return torch.cat([chunks[number] for number in order], dim)

    def rows_of_ranks(self, full: Tensor) -> Tensor:
        return super().rows_of_ranks(self.dealt(full, SEQUENCE))

    def spread(self, part: Tensor, count: int) -> tuple[Tensor, ...]:
        """Return all ranks' keys or values, in order, for each of `count` chunks of queries.

        `part` is this rank's, [B, H, T / ranks, D]. Gradients of what is returned are summed over
        all ranks' chunks.
        """

        def run(part: Tensor) -> tuple[Tensor, ...]:
            full = self.gathered(part.transpose(1, 2)).transpose(1, 2)
            return tuple(full.view_as(full) for _ in range(count))

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


_POSITIONS = 2  # the dim of queries, keys and values along which positions lie
_TILE = 128  # queries that are scored at a time in a ring


def cut_attention(module: Attend, context: SequenceCut) -> None:
    """Let an `Attend` run on this rank's part of sequences."""
    if context.method == "ring" and type(module).run is not Attend.run:
        what = f"context_method: ring can't compute {type(module).__name__}"
        why = "it merges the softmax of several ranks, and this attends in a way of its own"
        fix = "write context_method: gathered or all_to_all"
        raise UsageError(what, where="distributed.context_method", why=why, fix=fix)
    plain = type(module).positions
    alone = SequenceCut(
        None, context.blocks
    )  # how one rank attends to complete sequences in chunks

    def positions(
        self: Attend, length: int, device: torch.device, documents: Tensor | None = None
    ) -> Tensor:
        if context.is_outside:
            return plain(self, length, device, documents)
        return context.part(
            plain(self, length * context.ranks, device, documents), 0 if documents is None else 1
        )

    def forward(
        self: Attend, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None
    ) -> Tensor:
        """Attend from this rank's positions to those of all ranks, in the chosen way."""
        if context.is_outside:
            return self.run(q, k, v, 0, documents)
        if context.group is None or context.method == "gathered":
            return _gathered(self, q, k, v, documents, context)
        if context.method == "ring":
            return _Ring.apply(q, k, v, documents, context, self.causal)  # type: ignore[no-untyped-call,no-any-return]

        dim = self.heads_dim
        ranks = context.ranks
        if q.shape[dim] % ranks or k.shape[dim] % ranks:
            what = (
                f"{q.shape[dim]} heads of queries and {k.shape[dim]} of keys and values can't be"
                f" exchanged between {ranks} ranks along the axis context"
            )
            fix = "write context_method: gathered, or a context_size that divides both numbers"
            raise UsageError(
                what, where="distributed.context_method", why="each rank gets whole heads", fix=fix
            )

        # [B, H, T / ranks, D] → [B, H / ranks, T, D], and back: each is the other's gradient.
        to_heads = partial(_exchanged, given=dim, taken=_POSITIONS, context=context)
        to_positions = partial(_exchanged, given=_POSITIONS, taken=dim, context=context)
        q, k, v = (with_backward(to_heads, to_positions, each) for each in (q, k, v))
        if context.blocks is not None:
            attended = _gathered(self, q, k, v, documents, alone)
        else:
            q, k, v = (context.in_order(each, _POSITIONS) for each in (q, k, v))
            attended = context.dealt(self.run(q, k, v, 0, documents), _POSITIONS)
        return with_backward(to_positions, to_heads, attended)

    replace_method(module, MethodType(positions, module), by="context", method="positions")
    replace_method(module, MethodType(forward, module), by="context")


def _gathered(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, context: SequenceCut
) -> Tensor:
    """Let this rank's queries attend chunk by chunk to all ranks' keys and values."""
    numbers = context.here(q.shape[_POSITIONS] * context.ranks)
    count = len(numbers)
    size = q.shape[_POSITIONS] // count
    chunks = zip(
        numbers,
        q.chunk(count, _POSITIONS),
        context.spread(k, count),
        context.spread(v, count),
        strict=True,
    )
    attended = []
    for number, queries, keys, values in chunks:
        # What comes after the chunk's last query would be masked; left out, it costs nothing.
        last = (number + 1) * size if attend.causal else k.shape[_POSITIONS] * context.ranks
        seen = keys[:, :, :last], values[:, :, :last]
        attended.append(attend.run(queries, *seen, number * size, documents))
    return torch.cat(attended, _POSITIONS)


def _exchanged(x: Tensor, given: int, taken: int, context: SequenceCut) -> Tensor:
    """Give parts along one dim away to all ranks, for all ranks' parts along another."""
    parts = torch.stack(x.chunk(context.ranks, given))
    theirs = torch.empty_like(parts)
    context.count_sent(parts)
    dist.all_to_all_single(theirs, parts, group=context.group)
    return torch.cat(theirs.unbind(), taken)


@dataclass(eq=False)
class _Tile:
    """A tile of queries and a chunk of keys, and which of them see each other."""

    rows: slice  # of this rank's queries
    keys: slice  # of the keys that are here
    mask: Tensor | None  # broadcast to [B, Hk, G, rows, keys]; None: all

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        """Return float32 [B, Hk, G, rows, keys] for q [B, Hk, G, t, D] and k [B, Hk, t, D]."""
        rows = q[:, :, :, self.rows]
        found = rows.flatten(2, 3) @ k[:, :, self.keys].transpose(2, 3)
        scores = found.float().view(*rows.shape[:4], -1) * scale
        return scores if self.mask is None else scores.masked_fill(~self.mask, -torch.inf)


def _tiles(
    source: int,
    length: int,
    documents: Tensor | None,
    context: SequenceCut,
    causal: bool,
    device: torch.device,
) -> Iterator[_Tile]:
    """Yield what this rank's queries, `length` of them, see of the keys of rank `source`."""
    order = context.order(length * context.ranks)
    share = len(order) // context.ranks
    mine, theirs = (order[rank * share : (rank + 1) * share] for rank in (context.rank, source))
    size = length // share
    # the documents of each rank's tokens, as its tokens lie
    numbered = None if documents is None else context.dealt(documents, 1).chunk(context.ranks, 1)

    for position, number in enumerate(mine):
        for begin in range(position * size, (position + 1) * size, _TILE):
            rows = slice(begin, min(begin + _TILE, (position + 1) * size))
            for their_position, their_number in enumerate(theirs):
                if causal and their_number > number:
                    continue
                keys = slice(their_position * size, (their_position + 1) * size)

                # A chunk sees all of an earlier one; within itself a query sees up to its own key.
                mask = None
                if causal and their_number == number:
                    mask = torch.ones(rows.stop - begin, size, dtype=torch.bool, device=device)
                    mask = mask.tril(begin - position * size)
                if numbered is not None:
                    same = numbered[context.rank][:, rows, None] == numbered[source][:, None, keys]
                    same = same[:, None, None]
                    mask = same if mask is None else same & mask
                yield _Tile(rows, keys, mask)


class _Ring(torch.autograd.Function):
    """Attention with q, k and v of this rank's positions, and the documents of all.

    Keys and values travel from rank to rank, and no rank ever has all of them. A rank attends to
    one rank's keys and values after the other, and merges the results by their log-sum-exp (Milakov
    and Gimelshein 2018, arXiv:1805.02867). The backward pass sends them around once more, with the
    gradients that add up on the way. Scores exist for a tile of queries and one chunk of keys at a
    time. The order of summation depends on the rank.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        context: SequenceCut,
        causal: bool,
    ) -> Tensor:
        """Attend to the keys of one rank after the other, and merge as they come."""
        queries = _grouped(q, k.shape[1])
        scale = q.shape[-1] ** -0.5
        length = q.shape[_POSITIONS]
        out = queries.new_zeros(queries.shape, dtype=torch.float32)
        logs = out.new_full(out.shape[:-1], -torch.inf)  # log of the sum of weights so far
        both = torch.stack((k, v))
        for turn in range(context.ranks):
            source = (context.rank - turn) % context.ranks
            coming = _pass_on(both, context) if turn + 1 < context.ranks else None
            for tile in _tiles(source, length, documents, context, causal, q.device):
                scores = tile.scores(queries, both[0], scale)
                before = logs[..., tile.rows]
                after = torch.logaddexp(before, scores.logsumexp(-1))
                # A query has seen no key yet where all of them are of other documents: then
                # exp(−inf − 0) is 0, where exp(−inf − (−inf)) would be nan.
                base = after.masked_fill(after == -torch.inf, 0.0)
                p = (scores - base.unsqueeze(-1)).exp()
                values = (p.to(v.dtype).flatten(2, 3) @ both[1][:, :, tile.keys]).view(
                    *p.shape[:4], -1
                )
                out[..., tile.rows, :] = (
                    out[..., tile.rows, :] * (before - base).exp().unsqueeze(-1) + values
                )
                logs[..., tile.rows] = after
            both = both if coming is None else coming
        ctx.context = context
        ctx.causal = causal
        ctx.scale = scale
        returned = out.to(q.dtype).view_as(q)
        ctx.save_for_backward(q, k, v, returned, logs, documents)
        return returned

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        """Send keys round once more, with their gradients, which add up on the way."""
        q, k, v, out, logs, documents = ctx.saved_tensors
        context = ctx.context
        scale = ctx.scale
        queries, pulls, outs = (_grouped(each, k.shape[1]) for each in (q, gradients[0], out))
        # The softmax's own gradient is p (pull_p − Σ p pull_p), and that sum over all keys is the
        # product of the output and its gradient: no rank needs the keys of the others for it.
        dots = (pulls.float() * outs.float()).sum(-1)
        of_q = torch.zeros_like(queries, dtype=torch.float32)
        both = torch.stack((k, v))
        of_both = torch.zeros_like(both, dtype=torch.float32)
        for turn in range(context.ranks):
            source = (context.rank - turn) % context.ranks
            for tile in _tiles(
                source, q.shape[_POSITIONS], documents, context, ctx.causal, q.device
            ):
                rows = tile.rows
                keys = tile.keys
                p = (tile.scores(queries, both[0], scale) - logs[..., rows].unsqueeze(-1)).exp()
                pull = pulls[..., rows, :].flatten(2, 3)
                pull_p = (pull @ both[1][:, :, keys].transpose(2, 3)).float().view_as(p)
                pull_s = (
                    (p * (pull_p - dots[..., rows].unsqueeze(-1)) * scale).to(q.dtype).flatten(2, 3)
                )
                of_q[..., rows, :] += (pull_s @ both[0][:, :, keys]).view(*p.shape[:4], -1)
                of_both[0][:, :, keys] += pull_s.transpose(2, 3) @ queries[..., rows, :].flatten(
                    2, 3
                )
                of_both[1][:, :, keys] += p.to(q.dtype).flatten(2, 3).transpose(2, 3) @ pull
            if turn + 1 < context.ranks:
                both = _pass_on(both, context)
            # They travel with their keys; after the last turn they are those of this rank's own.
            of_both = _pass_on(of_both, context)
        of_k, of_v = of_both.to(k.dtype).unbind()
        return of_q.to(q.dtype).view_as(q), of_k, of_v, None, None, None


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return [B, H, t, D] as [B, groups, H / groups, t, D]."""
    return x.contiguous().view(x.shape[0], groups, -1, *x.shape[2:])


def _pass_on(x: Tensor, context: SequenceCut) -> Tensor:
    """Send a tensor to the next rank, and return the one of the rank before."""
    peers = (context.rank + 1) % context.ranks, (context.rank - 1) % context.ranks
    # an all-to-all in which each rank has something for the next one alone
    given, taken = (
        [x.numel() if rank == peer else 0 for rank in range(context.ranks)] for peer in peers
    )
    theirs = torch.empty_like(x, memory_format=torch.contiguous_format)
    if context.on_send is not None:
        context.on_send(x.numel() * x.element_size())
    dist.all_to_all_single(
        theirs.view(-1), x.contiguous().view(-1), taken, given, group=context.group
    )
    return theirs
