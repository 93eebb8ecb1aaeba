"""Products of layers that are cut over the axis `tensor`.

Two layers in a row on two ranks. Of `up` each rank holds some rows, so it computes some columns of
x upᵀ; of `down` it holds the columns that belong to these. x [1, 2, 3] is a sequence of two tokens:

    x    = [[1, 0, 2], [0, 1, 1]]
    up   = [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]]
    down = [[1, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1]]

                           rank 0                      rank 1
    of up [4, 3]           rows 0 and 1                rows 2 and 3
    of down [3, 4]         columns 0 and 1             columns 2 and 3
    column_linear(x, up)   [[1, 0], [0, 1]]            [[2, 3], [1, 2]]
    times its part of down [[1, 0, 0], [0, 1, 0]]      [[3, 3, 5], [2, 2, 3]]
    row_linear             [[4, 3, 5], [2, 3, 3]]      [[4, 3, 5], [2, 3, 3]]
    … with `sequence`      [[4, 3, 5]]                 [[2, 3, 3]]

Nothing is sent between the two layers. `row_linear` ends with a sum over ranks: an all-reduce, or
under sequence parallel (Korthikanti et al. 2022, arXiv:2205.05198) a reduce-scatter, after which
each rank has its own tokens. Then `enter` gathers the tokens again before the next `column_linear`.

The backward pass turns this round. The gradient of y is there on every rank, so `down` sends
nothing. Each rank's rows of `up` make a part of the gradient of x, here [1, 1, 0] and [3, 3, 4] for
each token of a y whose gradient is 1 everywhere; the backward pass of `enter` sums them to
[4, 4, 4].

Where bits count, a layer is computed in `blocks` on any number of ranks. With four blocks above,
each row of `up` and each column of `down` is a product by itself, and y is (b0 + b1) + (b2 + b3):
two ranks make one bracket each, one rank makes both. A product's backward pass then sums its own
blocks by the same tree, so `enter` has nothing left to sum.

The messages are in `lockstep.parallel.tensor.layer_cut`.

Tests: tests/parity/test_tensor.py, tests/parallel/test_worked_examples.py
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.parallel.changes import replace_method
from lockstep.parallel.tensor.layer_cut import SEQUENCE, LayerCut, tree_sum, with_backward

# a multiple of the numbers in a vector of any CPU's registers, several of which torch computes at a
# time
VECTORS = 64


def column_linear(x: Tensor, weight: Tensor, bias: Tensor | None, cut: LayerCut) -> Tensor:
    """Return this rank's columns of x Wᵀ + b.

    Shapes: x [B, T, K], weight [N / ranks, K] → [B, T, N / ranks].
    """
    return _Column.apply(*_autocast(cut.enter(x), weight, bias), cut)  # type: ignore[no-untyped-call,no-any-return]


def repeated_heads(weight: Tensor, heads: int, copies: int, cut: LayerCut) -> Tensor:
    """Return this rank's heads, with `copies` of each, of a weight [heads · width, …].

    Two heads of keys for eight of queries on four ranks: with two copies of each, [k0, k0, k1, k1],
    every rank has the one that its two heads of queries attend to.

    Its gradient is the sum over copies: of all ranks where bits count, else of this one.
    """

    def repeat(full: Tensor) -> Tensor:
        each = full.view(heads, -1, *full.shape[1:]).repeat_interleave(copies, 0)
        return cut.part(each, 0).flatten(0, 1)

    def pull_back(pull: Tensor) -> Tensor:
        """Return the gradient of the weight before it was repeated: the sum over the copies."""
        mine = heads * copies // cut.ranks
        parts = pull.view(mine, -1, *pull.shape[1:])
        if cut.blocks is None:
            # The weight is complete on every rank, and its gradient a part of the sum: ranks add
            # them once a step, with those of the other `partial` parameters.
            full = parts.new_zeros(heads * copies, *parts.shape[1:])
            full[cut.rank * mine : (cut.rank + 1) * mine] = parts
        else:
            # The order of additions must not depend on which copies a rank has.
            full = parts if cut.group is None else cut.gathered(parts, 0)
        by_copy = full.view(heads, copies, *parts.shape[1:]).transpose(0, 1)
        return tree_sum(by_copy).flatten(0, 1)

    return with_backward(repeat, pull_back, weight)


def fused_rows(weight: Tensor, sizes: Sequence[int], parts: int, cut: LayerCut) -> Tensor:
    """Return this rank's parts of a weight [Σ sizes, …] that holds several layers.

    A part has some rows of every layer. Of queries, keys and values with sizes 4, 2 and 2 in a
    weight [8, …], two parts are the rows [q0 q1 k0 v0] and [q2 q3 k1 v1].
    """
    layers = [layer.unflatten(0, (parts, -1)) for layer in weight.split(list(sizes))]  # type: ignore[no-untyped-call]
    return repeated_heads(torch.cat(layers, 1).flatten(0, 1), parts, 1, cut)


def row_linear(x: Tensor, weight: Tensor, cut: LayerCut) -> Tensor:
    """Return x Wᵀ, summed over ranks.

    Shapes: x [B, T, K / ranks], weight [N, K / ranks] → [B, T, N] or a part of it.
    """
    x, weight, _ = _autocast(x, weight, None)
    return _Row.apply(x, weight, cut)  # type: ignore[no-untyped-call,no-any-return]


def vocabulary_lookup(
    ids: Tensor, weight: Tensor, cut: LayerCut, padding_idx: int | None = None
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
    is_here = (ids >= first) & (ids < first + weight.shape[0])
    if padding_idx is not None:
        padding_idx = (
            padding_idx - first if first <= padding_idx < first + weight.shape[0] else None
        )
    outside = (ids < 0) | (ids >= cut.ranks * weight.shape[0])
    factor = torch.where(outside, torch.nan, is_here.to(weight.dtype))
    vectors = F.embedding(
        torch.where(is_here, ids - first, 0), weight, padding_idx
    ) * factor.unsqueeze(-1)
    # For each element one rank's part is not zero, so the sum has the same bits in any order.
    return with_backward(
        lambda vectors: _no_view(cut.sum(vectors[None], cut=cut.sequence)),
        lambda pull: _complete_gradient(pull, cut),
        vectors,
    )


def head_linear(x: Tensor, weight: Tensor, bias: Tensor | None, cut: LayerCut) -> Tensor:
    """Return x Wᵀ + b, or this rank's part of it for a loss that takes parts.

    Shapes: x [B, T, K], weight [N / ranks, K] → [B, T, N].
    """
    y = column_linear(x, weight, bias, cut)
    if cut.group is None or (cut.keeps_logits and not cut.is_outside):
        return y
    return with_backward(
        lambda y: _no_view(cut.gathered(y, -1 % y.dim())), lambda pull: cut.part(pull, -1), y
    )


def enter_heads(x: Tensor, heads: int, cut: LayerCut) -> Tensor:
    """Return x for each of this rank's heads, [B, T, D] → [heads, B · T, D].

    Gradients are summed over all heads.
    """
    shape = x.shape
    return with_backward(
        lambda x: x.reshape(1, -1, shape[-1]).expand(heads, -1, -1),
        lambda pull: _over_heads(pull, cut).view(shape),
        x,
    )


def leave_heads(parts: Tensor, cut: LayerCut) -> Tensor:
    """Return the sum over the heads of all ranks, in float32: [heads, …] → […]."""
    heads = parts.shape[0]
    dtype = parts.dtype
    run = partial(_over_heads, cut=cut, dtype=torch.float32)
    return with_backward(run, lambda pull: pull.to(dtype).expand(heads, *pull.shape), parts)


def experts_apart(
    run: Callable[[Tensor, list[int]], Tensor], rows: Tensor, counts: list[int], cut: LayerCut
) -> Tensor:
    """Return run(rows, counts), where each rank runs its own experts.

    `rows` [n, D] and the result are complete on every rank. With counts [2, 1, 0, 3] on two ranks,
    rank 0 runs experts 0 and 1 on rows 0 to 2, rank 1 experts 2 and 3 on rows 3 to 5.
    """
    each = len(counts) // cut.ranks
    sizes = [sum(counts[begin : begin + each]) for begin in range(0, len(counts), each)]

    def gathered(rows: Tensor) -> Tensor:
        # An all-gather of unequal parts, which gloo and NCCL have as an all-to-all alone: every
        # rank sends the same rows to each.
        if cut.on_send is not None:
            cut.on_send((cut.ranks - 1) * rows.numel() * rows.element_size())
        out = rows.new_empty(sum(sizes), *rows.shape[1:])
        same = rows.repeat(cut.ranks, *[1] * (rows.dim() - 1))
        dist.all_to_all_single(out, same, sizes, [len(rows)] * cut.ranks, group=cut.group)
        return out

    mine = with_backward(lambda rows: torch.split(rows, sizes)[cut.rank].clone(), gathered, rows)
    outputs = run(mine, counts[cut.rank * each : (cut.rank + 1) * each])
    return with_backward(
        gathered, lambda pull: torch.split(pull, sizes)[cut.rank].contiguous(), outputs
    )


def by_pieces(
    run: Callable[..., Tensor],
    x: Tensor | Sequence[Tensor],
    weights: Sequence[Tensor],
    cut: LayerCut,
    dim: int,
) -> Tensor:
    """Return run(*x, *weights), piece by piece along `dim`.

    Weights' gradients are summed over all ranks' pieces. A norm of [1, 8, D] in four pieces of two
    tokens: one rank runs four of them, two ranks two each, and the gradient of its weight is
    (p0 + p1) + (p2 + p3) on either.
    """
    tensors = [x] if isinstance(x, Tensor) else x
    count = cut.blocks_of(tensors[0].shape[dim])
    # A slice's strides would depend on the ranks, and with them the order in which torch sums over
    # its positions.
    pieces = [[piece.contiguous() for piece in each.chunk(count, dim)] for each in tensors]
    lent = [spread(weight, cut, count) for weight in weights]
    done = [run(*piece) for piece in zip(*pieces, *lent, strict=True)]
    return torch.cat(
        [with_backward(lambda x: x.view_as(x), Tensor.contiguous, each) for each in done], dim
    )


def spread(x: Tensor, cut: LayerCut, count: int) -> tuple[Tensor, ...]:
    """Return x, which is complete on all ranks, for each of `count` pieces.

    Its gradient is summed over the pieces of all ranks.
    """
    return with_backward(
        lambda x: tuple(x.view_as(x) for _ in range(count)),
        lambda *pulls: cut.sum(torch.stack(pulls)),
        x,
    )


def cut_dropout(module: nn.Dropout, cuts: Sequence[tuple[LayerCut, int]], *, by: str) -> None:
    """Make a dropout on this rank's part of a tensor draw the full tensor's random numbers.

    `cuts`: how the tensor is cut, and along which dim.
    """

    def forward(self: nn.Dropout, x: Tensor) -> Tensor:
        """Draw the mask of the complete tensor on each rank, and apply this rank's part of it."""
        if not (self.training and self.p and cuts) or any(cut.is_outside for cut, _ in cuts):
            return F.dropout(x, self.p, self.training)

        # Which elements fall out depends on the shape that is drawn, and must not on the ranks.
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
    """This rank's columns of x Wᵀ + b: x [B, T, K], weight [N / ranks, K].

    The gradient of x is a sum over the rows of W on all ranks. One product adds them up within
    itself, in an order of its own; products of blocks leave that sum to the tree.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cut: LayerCut) -> Tensor:
        """Return [B, T, N / ranks]: one product, or one for each block."""
        if cut.blocks is not None:
            weight = weight.contiguous()  # a transposed one's strides would depend on the ranks
        ctx.save_for_backward(x, weight)
        ctx.cut = cut
        ctx.count = cut.blocks_of(weight.shape[0])
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
        """Return the gradients of x, the weight and the bias, from those of this rank's columns."""
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
            # without blocks `enter` sums over ranks, once for all layers that took this x
            of_x = products[0] if ctx.cut.blocks is None else ctx.cut.sum(products)
        return of_x, of_weight, of_bias, None


class _Row(torch.autograd.Function):
    """x Wᵀ summed over ranks: x [B, T, K / ranks], weight [N, K / ranks].

    Its backward pass has nothing to sum: a rank's part of x met its part of the weight alone.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cut: LayerCut) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.cut = cut
        ctx.count = cut.blocks_of(weight.shape[1])
        products = _products(in_blocks(x, ctx.count), in_blocks(weight, ctx.count).transpose(1, 2))
        return _no_view(
            cut.sum(products.view(-1, *x.shape[:-1], weight.shape[0]), cut=cut.sequence)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        pulls = _alike(_complete_gradient(gradients[0], ctx.cut), ctx.count)
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


def _complete_gradient(gradient: Tensor, cut: LayerCut) -> Tensor:
    """Return the complete gradient of the outputs of cut layers.

    Where sequences are cut between layers, a rank has that of its own tokens.
    """
    return cut.gathered(gradient) if cut.sequence and cut.group is not None else gradient


def _over_heads(parts: Tensor, cut: LayerCut, dtype: torch.dtype | None = None) -> Tensor:
    blocks = parts.unflatten(0, (cut.blocks_of(parts.shape[0]), -1))  # type: ignore[no-untyped-call]
    return cut.sum(blocks.sum(1, dtype=dtype))
