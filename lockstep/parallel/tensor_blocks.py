"""Products, sums and messages of layers that are cut over the axis `tensor`.

Where bits count, products are computed in blocks.

Outside the cut layers, activations are whole on every rank, or each rank has a part of the sequence
(sequence parallel: Korthikanti et al. 2022, arXiv:2205.05198). `enter` brings them into cut layers,
`leave` sums what those return. As fixed blocks a matrix product has the same bits however the
blocks are dealt to ranks, and what several blocks add up to is one tree over them. Then each
product's backward pass sums its own blocks, so that `enter` has nothing left to sum.

Tests: tests/parity/test_tensor.py
"""

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.changes import replace_method
from lockstep.parallel.comm import all_gather_flat, reduce_scatter_flat
from lockstep.parallel.reproducible.tree import (
    Partials,
    TreeReduceScatter,
    tree_all_reduce,
    tree_assignment,
)

T = TypeVar("T")

# a multiple of the numbers in a vector of any CPU's registers, several of which torch computes at a
# time
VECTORS = 64
SEQUENCE = 1  # the dim of activations [B, T, …] that sequence parallel cuts

OnSend = Callable[[int], None]  # called with the bytes that this rank sends, in a dry run


class Cut:
    """The way in which layers are cut, and the messages between their ranks.

    `blocks` in a whole layer; None: each rank's part is one product, and sums are plain.
    `sequence`: outside of the cut layers a rank has a part of the sequence.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        blocks: int | None,
        *,
        sequence: bool,
        within: "Cut | None" = None,
        keeps_logits: bool = False,
        on_send: OnSend | None = None,
    ) -> None:
        self.group, self.blocks, self.sequence = group, blocks, sequence
        self.ranks, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        self._whole: weakref.ref[Tensor] = weakref.ref(torch.empty(0))
        self._entered: Tensor | None = None
        self.on_send = on_send
        self.within = within  # how the sequences are cut, of which this cuts a part
        self.keeps_logits = keeps_logits  # the loss takes a rank's part of the logits
        # the model is called from outside of the step: sequences and logits are whole everywhere
        self.whole = False

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Call the model, inside of the block, from outside of the step."""
        self.whole = True
        try:
            yield
        finally:
            self.whole = False

    def blocks_of(self, size: int) -> int:
        """Return the number of blocks of this rank in a dim of which it holds `size`."""
        return 1 if self.blocks is None else math.gcd(size * self.ranks, self.blocks) // self.ranks

    def enter(self, x: Tensor) -> Tensor:
        """Return whole activations for layers that are cut.

        Layers that are given the same ones share one message.
        """
        if self.group is None or not (self.sequence or self.blocks is None):
            return x
        if (
            self._whole() is not x
            or self._entered is None
            or self._entered.requires_grad != x.requires_grad
        ):
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
            self._whole = weakref.ref(x)
        assert self._entered is not None
        return self._entered

    def sum(self, parts: Tensor, *, cut: bool = False) -> Tensor:
        """Return the sum of `parts`, [this rank's blocks, …], over all ranks.

        With `cut` return this rank's part of the sum.
        """
        count = len(parts)
        if self.group is None:
            return _tree_sum(parts)
        if self.blocks is None:
            return self._plain_sum(parts[0], cut=cut)
        leaves, nodes = (
            count * self.ranks,
            tree_assignment(count * self.ranks, self.ranks)[self.rank],
        )
        if len(nodes) == 1:
            sums: list[Tensor | None] = [_tree_sum(parts)]
        else:
            partials = Partials(leaves)
            for place, part in enumerate(parts):
                partials.add(self.rank * count + place, [part], owned=False)
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

    def count_sent(self, whole: Tensor, times: int = 1) -> None:
        if self.on_send is not None:
            self.on_send(
                times * whole.numel() * whole.element_size() * (self.ranks - 1) // self.ranks
            )

    def rows_of_ranks(self, whole: Tensor) -> Tensor:
        """Return [B, T, …] as [ranks, numbers of its part of the sequence]."""
        return torch.stack(whole.chunk(self.ranks, SEQUENCE)).reshape(self.ranks, -1)

    def part(self, whole: Tensor, dim: int = SEQUENCE) -> Tensor:
        return whole.chunk(self.ranks, dim)[self.rank].contiguous()

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


def _tree_sum(parts: Tensor) -> Tensor:
    """Return the sum over the first dim as one tree (`lockstep.parallel.reproducible.tree`)."""
    if len(parts) & (len(parts) - 1) == 0:  # neighbours are added, all pairs at once
        while len(parts) > 1:
            parts = parts[0::2] + parts[1::2]
        return parts[0]
    partials = Partials(len(parts))
    for place, part in enumerate(parts):
        partials.add(place, [part], owned=False)
    return partials.single()


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    """Return this rank's columns of x Wᵀ + b.

    Shapes: x [B, T, K], weight [N / ranks, K] → [B, T, N / ranks].
    """
    return _Column.apply(*_autocast(cut.enter(x), weight, bias), cut)  # type: ignore[no-untyped-call,no-any-return]


def repeated_heads(weight: Tensor, heads: int, copies: int, cut: Cut) -> Tensor:
    """Return this rank's run of heads, with `copies` of each, of a weight [heads · width, …].

    Its gradient is the sum over copies: of all ranks where bits count, else of this one.
    """

    def repeat(whole: Tensor) -> Tensor:
        each = whole.view(heads, -1, *whole.shape[1:]).repeat_interleave(copies, 0)
        return cut.part(each, 0).flatten(0, 1)

    def pull_back(pull: Tensor) -> Tensor:
        mine = heads * copies // cut.ranks
        parts = pull.view(mine, -1, *pull.shape[1:])
        if cut.blocks is None:
            whole = parts.new_zeros(heads * copies, *parts.shape[1:])
            whole[cut.rank * mine : (cut.rank + 1) * mine] = parts
        else:
            whole = parts if cut.group is None else cut.gathered(parts, 0)
        by_copy = whole.view(heads, copies, *parts.shape[1:]).transpose(0, 1)
        return _tree_sum(by_copy).flatten(0, 1)

    return with_backward(repeat, pull_back, weight)


def fused_rows(weight: Tensor, sizes: Sequence[int], parts: int, cut: Cut) -> Tensor:
    """Return this rank's run of `parts` of a weight [Σ sizes, …] that holds several layers.

    A part has some rows of every layer.
    """
    layers = [layer.unflatten(0, (parts, -1)) for layer in weight.split(list(sizes))]  # type: ignore[no-untyped-call]
    return repeated_heads(torch.cat(layers, 1).flatten(0, 1), parts, 1, cut)


def row_linear(x: Tensor, weight: Tensor, cut: Cut) -> Tensor:
    """Return x Wᵀ, summed over ranks.

    Shapes: x [B, T, K / ranks], weight [N, K / ranks] → [B, T, N] or a part of it.
    """
    x, weight, _ = _autocast(x, weight, None)
    return _Row.apply(x, weight, cut)  # type: ignore[no-untyped-call,no-any-return]


def vocabulary_lookup(
    ids: Tensor, weight: Tensor, cut: Cut, padding_idx: int | None = None
) -> Tensor:
    """Return rows of the complete table; ids outside of it give nan.

    Shapes: ids [B, T], weight [V / ranks, D] → [B, T, D] or a part of it.
    """
    if cut.group is None:
        return F.embedding(ids, weight, padding_idx)
    if cut.sequence and ids.shape[SEQUENCE] % cut.ranks:
        what = (
            f"{cut.ranks} ranks along the axis tensor can't share a sequence of"
            f" {ids.shape[SEQUENCE]}"
        )
        fix = "pad sequences to a multiple of the ranks, or write sequence_parallel: false"
        raise UsageError(what, where="distributed.sequence_parallel", fix=fix)
    first = cut.rank * weight.shape[0]
    here = (ids >= first) & (ids < first + weight.shape[0])
    if padding_idx is not None:
        padding_idx = (
            padding_idx - first if first <= padding_idx < first + weight.shape[0] else None
        )
    outside = (ids < 0) | (ids >= cut.ranks * weight.shape[0])
    factor = torch.where(outside, torch.nan, here.to(weight.dtype))
    found = F.embedding(torch.where(here, ids - first, 0), weight, padding_idx) * factor.unsqueeze(
        -1
    )
    # Of the ranks' parts one is not zero, for each element: their sum has the same bits in any
    # order.
    return with_backward(
        lambda found: _no_view(cut.sum(found[None], cut=cut.sequence)),
        lambda pull: _left(pull, cut),
        found,
    )


def head_linear(x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
    """Return x Wᵀ + b, or this rank's part of it for a loss that takes parts.

    Shapes: x [B, T, K], weight [N / ranks, K] → [B, T, N].
    """
    y = column_linear(x, weight, bias, cut)
    if cut.group is None or (cut.keeps_logits and not cut.whole):
        return y
    return with_backward(
        lambda y: _no_view(cut.gathered(y, -1 % y.dim())), lambda pull: cut.part(pull, -1), y
    )


def enter_heads(x: Tensor, heads: int, cut: Cut) -> Tensor:
    """Return x for each of this rank's heads, [B, T, D] → [heads, B · T, D].

    Gradients are summed over all heads.
    """
    shape = x.shape
    return with_backward(
        lambda x: x.reshape(1, -1, shape[-1]).expand(heads, -1, -1),
        lambda pull: _over_heads(pull, cut).view(shape),
        x,
    )


def leave_heads(parts: Tensor, cut: Cut) -> Tensor:
    """Return the sum over the heads of all ranks, in float32: [heads, …] → […]."""
    heads, dtype = parts.shape[0], parts.dtype
    run = partial(_over_heads, cut=cut, dtype=torch.float32)
    return with_backward(run, lambda pull: pull.to(dtype).expand(heads, *pull.shape), parts)


def experts_apart(
    run: Callable[[Tensor, list[int]], Tensor], rows: Tensor, counts: list[int], cut: Cut
) -> Tensor:
    """Return run(rows, counts), where each rank runs its own experts.

    `rows` [n, D] and the result are complete on every rank.
    """
    each = len(counts) // cut.ranks
    sizes = [sum(counts[begin : begin + each]) for begin in range(0, len(counts), each)]

    def gathered(rows: Tensor) -> Tensor:
        if cut.on_send is not None:
            cut.on_send((cut.ranks - 1) * rows.numel() * rows.element_size())
        out = rows.new_empty(sum(sizes), *rows.shape[1:])
        same = rows.repeat(cut.ranks, *[1] * (rows.dim() - 1))
        dist.all_to_all_single(out, same, sizes, [len(rows)] * cut.ranks, group=cut.group)
        return out

    mine = with_backward(lambda rows: torch.split(rows, sizes)[cut.rank].clone(), gathered, rows)
    made = run(mine, counts[cut.rank * each : (cut.rank + 1) * each])
    return with_backward(
        gathered, lambda pull: torch.split(pull, sizes)[cut.rank].contiguous(), made
    )


def by_pieces(
    run: Callable[..., Tensor],
    x: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    cut: Cut,
    dim: int,
) -> Tensor:
    """Return run(*x, *weights), piece by piece along `dim`.

    Weights' gradients are summed over all ranks' pieces.
    """
    given = [x] if isinstance(x, Tensor) else x
    count = cut.blocks_of(given[0].shape[dim])
    # A slice's strides would depend on the ranks, and with them the order in which torch sums over
    # its positions.
    pieces = [[piece.contiguous() for piece in each.chunk(count, dim)] for each in given]
    lent = [spread(weight, cut, count) for weight in weights]
    done = [run(*piece) for piece in zip(*pieces, *lent, strict=True)]
    return torch.cat(
        [with_backward(lambda x: x.view_as(x), Tensor.contiguous, each) for each in done], dim
    )


def spread(x: Tensor, cut: Cut, count: int) -> tuple[Tensor, ...]:
    """Return x, which is whole on all ranks, for each of `count` pieces.

    Its gradient is summed over all ranks'.
    """
    return with_backward(
        lambda x: tuple(x.view_as(x) for _ in range(count)),
        lambda *pulls: cut.sum(torch.stack(pulls)),
        x,
    )


def cut_dropout(module: nn.Dropout, cuts: Sequence[tuple[Cut, int]], *, by: str) -> None:
    """Make a dropout on this rank's part of a tensor draw the full tensor's random numbers.

    `cuts`: how the tensor is cut, and along which dim.
    """

    def forward(self: nn.Dropout, x: Tensor) -> Tensor:
        if not (self.training and self.p and cuts) or any(cut.whole for cut, _ in cuts):
            return F.dropout(x, self.p, self.training)
        shape = list(x.shape)
        for cut, dim in cuts:
            shape[dim] *= cut.ranks
        kept = F.dropout(x.new_ones(shape), self.p)
        for cut, dim in reversed(cuts):
            kept = cut.part(kept, dim)
        return x * kept

    replace_method(module, MethodType(forward, module), by=by)


def _autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut) -> Tensor:
        if cut.blocks is not None:
            weight = weight.contiguous()  # a transposed one's strides would depend on the ranks
        ctx.save_for_backward(x, weight)
        ctx.cut, ctx.count = cut, cut.blocks_of(weight.shape[0])
        if cut.blocks is None:
            y = x @ weight.t()
        else:
            blocks = _products(
                _alike(x, ctx.count),
                weight.reshape(ctx.count, -1, weight.shape[-1]).transpose(1, 2),
            )
            y = blocks.transpose(0, 1).reshape(*x.shape[:-1], -1)
            if cut.group is not None and y.device.type == "cpu" and y.numel() % VECTORS:
                # torch computes exp, tanh … for whole vectors of a CPU in one way, and for what
                # remains in another.
                warnings.warn(
                    f"equal bits are not certain: a rank computes {y.numel()} activations of a cut"
                    f" layer, {list(y.shape)}, no multiple of {VECTORS}, so that a CPU may round"
                    " the last of them differently on another number of ranks\n  do: let the units"
                    f" of a rank times the tokens of a micro-batch be a multiple of {VECTORS}",
                    stacklevel=1,
                )
        return _no_view(y) if bias is None else y + bias

    @staticmethod
    def backward(
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        pulls = in_blocks(gradients[0], ctx.count)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[1]:
            of_weight = _products(pulls.transpose(1, 2), _alike(x, ctx.count)).flatten(0, 1)
        if ctx.needs_input_grad[2]:
            of_bias = pulls.sum(1).flatten()
        if ctx.needs_input_grad[0]:
            rows = weight.reshape(ctx.count, -1, weight.shape[-1])
            products = _products(pulls, rows).view(-1, *x.shape)
            # else: by `enter`
            of_x = products[0] if ctx.cut.blocks is None else ctx.cut.sum(products)
        return of_x, of_weight, of_bias, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cut: Cut) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.cut, ctx.count = cut, cut.blocks_of(weight.shape[1])
        products = _products(in_blocks(x, ctx.count), in_blocks(weight, ctx.count).transpose(1, 2))
        return _no_view(
            cut.sum(products.view(-1, *x.shape[:-1], weight.shape[0]), cut=cut.sequence)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        pulls = _alike(_left(gradients[0], ctx.cut), ctx.count)
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = _products(pulls, in_blocks(weight, ctx.count)).transpose(0, 1).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            products = _products(pulls.transpose(1, 2), in_blocks(x, ctx.count))
            of_weight = products.transpose(0, 1).reshape(weight.shape)
        return of_x, of_weight, None


def _no_view(x: Tensor) -> Tensor:
    """Return the same memory without a base.

    FSDP2 warns of modules that return views, which nothing here writes to.
    """
    return x.detach()


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, one block after the other.

    A batched product can have other bits for another number of blocks.
    """
    if len(a) == 1:
        return (a[0] @ b[0]).unsqueeze(0)
    return torch.stack([one @ other for one, other in zip(a, b, strict=True)])


def _alike(x: Tensor, count: int) -> Tensor:
    """Return [..., K] as [count, rows, K], the same for each block."""
    return x.contiguous().view(-1, x.shape[-1]).expand(count, -1, -1)


def in_blocks(x: Tensor, count: int) -> Tensor:
    """Return [..., count · K] as [count, rows, K].

    A block lies in memory of its own: between the others of its rank its strides, and with them the
    bits of a product, would depend on how many these are.
    """
    return x.reshape(-1, count, x.shape[-1] // count).transpose(0, 1).contiguous()


def _left(gradient: Tensor, cut: Cut) -> Tensor:
    return cut.gathered(gradient) if cut.sequence and cut.group is not None else gradient


def _over_heads(parts: Tensor, cut: Cut, dtype: torch.dtype | None = None) -> Tensor:
    blocks = parts.unflatten(0, (cut.blocks_of(parts.shape[0]), -1))  # type: ignore[no-untyped-call]
    return cut.sum(blocks.sum(1, dtype=dtype))
