"""Cuts layers over the axis `tensor`, and carries the messages between their ranks.

Products of cut layers (`lockstep.parallel.tensor.products`) begin with `LayerCut.enter`, and end
with `LayerCut.sum`. Two ranks, each of which has a part [1, 4, 3] of the sum for four tokens:

    sum              [1, 4, 3] on both: an all-reduce
    sum, cut         [1, 2, 3]: rank 0 has the sums of tokens 0 and 1, rank 1 those of 2 and 3
    gathered, enter  [1, 4, 3] on both again, from the two parts

Tests: tests/parity/test_tensor.py, tests/parallel/test_worked_examples.py
"""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.comm import all_gather_flat, reduce_scatter_flat
from lockstep.parallel.reproducible.tree import (
    Partials,
    TreeReduceScatter,
    tree_all_reduce,
    tree_assignment,
)

T = TypeVar("T")

SEQUENCE = 1  # the dim of activations [B, T, …] that sequence parallel cuts

OnSend = Callable[[int], None]  # called with the bytes that this rank sends, in a dry run


class LayerCut:
    """The way in which layers are cut, and the messages between their ranks.

    `blocks` in a complete layer; None: each rank's part is one product, and sums are plain.
    `sequence`: outside of the cut layers a rank has a part of the sequence.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        blocks: int | None,
        *,
        sequence: bool,
        within: "LayerCut | None" = None,
        keeps_logits: bool = False,
        on_send: OnSend | None = None,
    ) -> None:
        self.group = group
        self.blocks = blocks
        self.sequence = sequence
        self.ranks = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        # What entered cut layers last, and what they were given. Only a weak reference to the
        # former: it must not live longer than the graph that needs it.
        self._last: weakref.ref[Tensor] = weakref.ref(torch.empty(0))
        self._entered: Tensor | None = None
        self.on_send = on_send
        self.within = within  # how the sequences are cut, of which this cuts a part
        self.keeps_logits = keeps_logits  # the loss takes a rank's part of the logits
        # whether the model is called from outside of the step, with complete sequences and logits
        self.is_outside = False

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Call the model, inside of the block, from outside of the step."""
        self.is_outside = True
        try:
            yield
        finally:
            self.is_outside = False

    def stay_outside(self) -> None:
        """Take all further calls of the model as calls from outside of the step."""
        self.is_outside = True

    def blocks_of(self, size: int) -> int:
        """Return the number of blocks of this rank in a dim of which it holds `size`.

        With 8 `blocks` on 2 ranks a dim of 12, 6 a rank, has gcd(12, 8) = 4 blocks, 2 a rank: the
        number in all depends on the size and on `blocks`, never on the ranks.
        """
        return 1 if self.blocks is None else math.gcd(size * self.ranks, self.blocks) // self.ranks

    def enter(self, x: Tensor) -> Tensor:
        """Return complete activations for layers that are cut.

        Layers that are given the same ones share one message.
        """
        # Complete already, and each product sums the gradient of its input by itself.
        if self.group is None or not (self.sequence or self.blocks is None):
            return x

        # Queries, keys and values take the same x. One node for the three: its gradient arrives as
        # the sum of theirs, and is summed over ranks once.
        is_new = (
            self._last() is not x
            or self._entered is None
            or self._entered.requires_grad != x.requires_grad
        )
        if is_new:
            self._entered = with_backward(
                lambda x: self.gathered(x) if self.sequence else x.view_as(x),
                # Products in blocks have summed their gradients already.
                lambda pull: (
                    self.sum(pull[None], cut=self.sequence)
                    if self.blocks is None
                    else self.part(pull)
                ),
                x,
            )
            self._last = weakref.ref(x)
        assert self._entered is not None
        return self._entered

    def sum(self, parts: Tensor, *, cut: bool = False) -> Tensor:
        """Return the sum of `parts`, [this rank's blocks, …], over all ranks.

        With `cut` return this rank's part of the sum.
        """
        count = len(parts)
        if self.group is None:
            return tree_sum(parts)
        if self.blocks is None:
            return self._plain_sum(parts[0], cut=cut)

        # The blocks of all ranks are the leaves of one tree. This rank's are neighbours: on a power
        # of two ranks they are one node of it, whose sum is sent; on three ranks, several.
        leaves = count * self.ranks
        nodes = tree_assignment(leaves, self.ranks)[self.rank]
        if len(nodes) == 1:
            sums: list[Tensor | None] = [tree_sum(parts)]
        else:
            partials = Partials(leaves)
            for number, part in enumerate(parts):
                partials.add(self.rank * count + number, [part], owned=False)
            sums = [values[0] if (values := partials.take(node)) else None for node in nodes]

        like = next(value for value in sums if value is not None)
        if cut:
            rows = [None if value is None else self.rows_of_ranks(value) for value in sums]
            share = like.numel() // self.ranks
            mine = TreeReduceScatter(rows, like.reshape(-1), share, leaves, self.group).finish()
            return mine.view(like.shape[0], -1, *like.shape[2:])
        out = like.new_empty(like.numel())
        tree_all_reduce(
            [None if v is None else v.reshape(-1) for v in sums], out, leaves, self.group
        )
        return out.view_as(like)

    def _plain_sum(self, part: Tensor, *, cut: bool) -> Tensor:
        """Return the sum over ranks by an all-reduce, or this rank's part by a reduce-scatter."""
        self.count_sent(part, 1 if cut else 2)
        if not cut:
            # A copy: what selective activation checkpointing keeps of a product is not to be
            # written to.
            total = part.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=self.group)
            return total
        assert self.group is not None
        rows = self.rows_of_ranks(part)
        # its reduce-scatter is an all-reduce of which a part is kept
        if dist.get_backend(self.group) == "gloo":
            theirs = torch.empty_like(rows)
            dist.all_to_all_single(theirs, rows, group=self.group)
            mine = theirs.sum(0)
        else:
            mine = torch.empty_like(rows[0])
            reduce_scatter_flat(mine, rows.view(-1), group=self.group)
        return mine.view(part.shape[0], -1, *part.shape[2:])

    def count_sent(self, full: Tensor, times: int = 1) -> None:
        """Report, in a dry run, what a collective over a tensor sends: (ranks − 1) / ranks of it.

        An all-reduce sends that twice (`times`).
        """
        if self.on_send is not None:
            self.on_send(
                times * full.numel() * full.element_size() * (self.ranks - 1) // self.ranks
            )

    def rows_of_ranks(self, full: Tensor) -> Tensor:
        """Return [B, T, …] as [ranks, numbers of its part of the sequence]."""
        return torch.stack(full.chunk(self.ranks, SEQUENCE)).reshape(self.ranks, -1)

    def part(self, full: Tensor, dim: int = SEQUENCE) -> Tensor:
        """Return this rank's part of a tensor along `dim`."""
        return full.chunk(self.ranks, dim)[self.rank].contiguous()

    def gathered(self, part: Tensor, dim: int = SEQUENCE) -> Tensor:
        """Return the parts of all ranks side by side."""
        assert self.group is not None
        parts = part.new_empty(self.ranks, *part.shape)
        self.count_sent(parts)
        all_gather_flat(parts.view(-1), part.contiguous().view(-1), group=self.group)
        return parts.movedim(0, dim).flatten(dim, dim + 1)


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], pull_back: Callable[..., Any], x: Tensor) -> Any:
        ctx.pull_back = pull_back
        return run(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Any]:
        return None, None, ctx.pull_back(*gradients)


def with_backward(
    run: Callable[[Tensor], T], pull_back: Callable[..., Tensor | None], x: Tensor
) -> T:
    """Return run(x); the gradient of x is pull_back(gradient of each tensor that it returned)."""
    return _WithBackward.apply(run, pull_back, x)  # type: ignore[no-untyped-call,no-any-return]


def tree_sum(parts: Tensor) -> Tensor:
    """Return the sum over the first dim as one tree (`lockstep.parallel.reproducible.tree`)."""
    if len(parts) & (len(parts) - 1) == 0:  # neighbours are added, all pairs at once
        while len(parts) > 1:
            parts = parts[0::2] + parts[1::2]
        return parts[0]
    partials = Partials(len(parts))
    for number, part in enumerate(parts):
        partials.add(number, [part], owned=False)
    return partials.single()
