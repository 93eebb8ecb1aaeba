"""Computes a layer that is cut over the ranks of the axis `tensor`, for each way of a plan.

A layer keeps its class and its parameters; its `forward` is replaced on the instance. A linear
layer [outputs, inputs] of x on two ranks, and what each rank computes of it:

    column, heads   some rows of W: some columns of x Wᵀ              up, query, key, value
    row             some columns of W: a part of x Wᵀ, which is summed       down, out
    head            as column, and gathered, unless the loss takes parts
    vocabulary      some rows of a table: the tokens that are there, summed
    fused …         W is complete: some rows of each layer that it holds
    routed, experts some experts
    scope, inner    some heads of an attention that has no weights of its own, and norms over them
    sequence        some tokens, between the layers that are cut

The products are in `lockstep.parallel.tensor.products`; which parameters a rank keeps of which
layer is in `lockstep.parallel.tensor.cuts`.

Tests: tests/parity/test_tensor.py, tests/parallel/test_worked_examples.py
"""

import copy
import math
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.config.checks_training import divisors
from lockstep.errors import UsageError
from lockstep.models.hf_layers import is_transposed
from lockstep.models.language import TokenLosses
from lockstep.models.mixture import through_experts
from lockstep.parallel.changes import replace_method
from lockstep.parallel.tensor import products
from lockstep.parallel.tensor.layer_cut import SEQUENCE, LayerCut
from lockstep.parallel.tensor.loss_parallel import cut_token_losses

AXIS = "tensor"  # over whose ranks layers are cut


def _replace(module: nn.Module, run: Callable[..., Tensor]) -> None:
    """Replace a module's method `product`, which is given the weight, or else `forward`.

    A method of the instance, so that a deep copy of the module has one of its own.
    """
    method = "product" if hasattr(module, "product") else "forward"
    replace_method(module, MethodType(run, module), by=AXIS, method=method)


def weight_of(module: Any) -> Tensor:
    """Return a layer's weight as [outputs, inputs]; GPT-2 of transformers has it transposed."""
    weight: Tensor = module.weight
    return weight.t() if is_transposed(module) else weight


def check_divides(name: str, size: int, unit: int, cut: LayerCut) -> None:
    """Refuse a dim that the ranks can't share; `unit`: how many of its rows stay together."""
    if size % (unit * cut.ranks) == 0:
        return
    parts = f"{size // unit} heads" if unit > 1 else f"{size} rows or columns"
    what = f"{name} has {parts}, which {cut.ranks} ranks can't share"
    sizes = " or ".join(map(str, divisors(math.gcd(size // unit, cut.ranks), cut.ranks)))
    fix = f"write tensor_size: {sizes}, or give the model a multiple of {cut.ranks}"
    raise UsageError(what, where="distributed.tensor_size", fix=fix)


def _linear(
    product: Callable[[Tensor, Tensor, Tensor | None, LayerCut], Tensor],
) -> Callable[[nn.Module, LayerCut], None]:
    """Return what makes a linear layer multiply by `product`, on this rank's part of the weight."""

    def make(module: nn.Module, cut: LayerCut) -> None:
        def forward(self: Any, x: Tensor, *given: Tensor) -> Tensor:
            return (
                product(x, given[0], None, cut)
                if given
                else product(x, weight_of(self), self.bias, cut)
            )

        _replace(module, forward)

    return make


def _row(module: nn.Module, cut: LayerCut) -> None:
    """Let a layer whose inputs are shared out multiply: ranks' products are parts of a sum.

    x [B, T, K / ranks] by weight [N, K / ranks] → [B, T, N], once the ranks have added theirs.
    """

    def forward(self: Any, x: Tensor, *given: Tensor) -> Tensor:
        y = products.row_linear(x, given[0] if given else weight_of(self), cut)
        if given or self.bias is None:
            return y
        # After the sum, or each rank would add it. Of a part of the tokens its gradient is a part,
        # too: where bits count it is summed piece by piece.
        bias: Tensor = self.bias.to(y.dtype)
        if cut.blocks is None or not cut.sequence:
            return y + bias
        return products.by_pieces(torch.add, y, (bias,), cut, SEQUENCE)

    _replace(module, forward)


def repeat_heads(module: nn.Module, width: int, copies: int, cut: LayerCut) -> None:
    """Keep a layer of few heads complete on each rank; compute heads that its queries attend to."""

    def forward(self: Any, x: Tensor, *given: Tensor) -> Tensor:
        weight, bias = (given[0], None) if given else (self.weight, self.bias)
        heads = weight.shape[0] // width
        bias = None if bias is None else products.repeated_heads(bias, heads, copies, cut)
        return products.column_linear(
            x, products.repeated_heads(weight, heads, copies, cut), bias, cut
        )

    _replace(module, forward)


def fuse(module: Any, name: str, unit: int, cut: LayerCut) -> None:
    """Keep a weight of several layers complete on each rank; compute this rank's part of each."""
    # As many parts as all of its layers have: queries of 8 heads, keys and values of 2 have two.
    parts = math.gcd(*(size // unit for size in module.fused_sizes))
    check_divides(f"{name}.weight", parts * unit, unit, cut)

    def forward(self: Any, x: Tensor) -> Tensor:
        """Multiply by several layers' weights that are fused into one, [parts of q, k, v, …]."""
        weight = products.fused_rows(weight_of(self), self.fused_sizes, parts, cut)
        bias = (
            None
            if self.bias is None
            else products.fused_rows(self.bias, self.fused_sizes, parts, cut)
        )
        fused = products.column_linear(x, weight, bias, cut).unflatten(-1, (parts // cut.ranks, -1))  # type: ignore[no-untyped-call]
        # [q0 q1 k0 v0] of each part → all queries, then all keys, then all values
        layers = fused.split([size // parts for size in self.fused_sizes], -1)
        return torch.cat([layer.flatten(-2) for layer in layers], -1)

    replace_method(module, MethodType(forward, module), by=AXIS)


def _vocabulary(module: nn.Module, cut: LayerCut) -> None:
    """Let a table look up the tokens whose rows are here, and sum over ranks."""

    def forward(self: Any, ids: Tensor, *given: Tensor) -> Tensor:
        weight = given[0] if given else self.weight
        return products.vocabulary_lookup(ids, weight, cut, getattr(self, "padding_idx", None))

    _replace(module, forward)


def _loss(module: nn.Module, cut: LayerCut) -> None:
    """Let a loss take this rank's part of the logits."""

    def forward(self: Any, logits: Tensor, targets: Tensor) -> Tensor:
        terms = self.terms if isinstance(self, TokenLosses) else (0.0, 0.0)
        return cut_token_losses(logits, targets, cut, terms)

    if isinstance(module, TokenLosses) and cut.sequence and cut.blocks is not None:
        module.cut_into(cut.blocks // cut.ranks)
    if cut.keeps_logits:
        replace_method(module, MethodType(forward, module), by=AXIS)


def _experts(module: nn.Module, cut: LayerCut) -> None:
    """Let each rank run the experts that it holds, on the rows of all."""
    if cut.group is None:
        return
    before: Callable[..., Tensor] = module.forward.__func__  # type: ignore[attr-defined]  # its self may be a stand-in

    def forward(self: nn.Module, rows: Tensor, counts: list[int]) -> Tensor:
        return products.experts_apart(MethodType(before, self), rows, counts, cut)

    replace_method(module, MethodType(forward, module), by=AXIS)


def _routed(module: nn.Module, cut: LayerCut) -> None:
    """Give each rank the experts of a Hugging Face mixture that it holds."""

    def run(self: Any, rows: Tensor, counts: list[int]) -> Tensor:
        outputs = []
        experts = self.gate_up_proj.unbind(), self.down_proj.unbind()
        for x, gate_up, down in zip(torch.split(rows, counts), *experts, strict=True):
            gate, up = F.linear(x, gate_up).chunk(2, -1)
            outputs.append(F.linear(self.act_fn(gate) * up, down))
        return torch.cat(outputs)

    def forward(self: Any, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        counts = (
            chosen.flatten()[:, None] == torch.arange(self.num_experts, device=chosen.device)
        ).sum(0)
        own: Callable[..., Tensor] = partial(run, self)
        apart = own if cut.group is None else partial(products.experts_apart, own, cut=cut)
        return through_experts(apart, tokens, chosen, weights, counts)  # type: ignore[no-any-return]

    replace_method(module, MethodType(forward, module), by=AXIS)


def _scope(module: nn.Module, cut: LayerCut) -> None:
    """Let a module enter and leave its heads by those of this rank."""

    def enter(_self: Any, x: Tensor, heads: int) -> Tensor:
        return products.enter_heads(x, heads, cut)

    def leave(_self: Any, parts: Tensor) -> Tensor:
        return products.leave_heads(parts, cut)

    replace_method(module, MethodType(enter, module), by=AXIS, method="enter")
    replace_method(module, MethodType(leave, module), by=AXIS, method="leave")
    for inner in module.modules():
        if isinstance(inner, nn.Dropout):
            _dropout(inner, cut, 0)


def _sequence(module: nn.Module, cut: LayerCut) -> None:
    """Let a norm or a dropout between cut layers work on this rank's tokens."""
    if not cut.sequence:
        return
    if isinstance(module, nn.Dropout):
        _dropout(module, cut, SEQUENCE)
    else:
        _by_pieces(module, cut, SEQUENCE)


def _by_pieces(module: nn.Module, cut: LayerCut, dim: int) -> None:
    """Make a norm run piece by piece where bits count.

    So a weight's gradient is the same sum over pieces on any number of ranks.
    """
    if cut.blocks is None:
        return
    plain = copy.copy(module)  # with the same parameters, and its own forward pass
    names = [name for name, _ in module.named_parameters()]

    def run(piece: Tensor, *weights: Tensor) -> Tensor:
        return torch.func.functional_call(plain, dict(zip(names, weights, strict=True)), (piece,))  # type: ignore[no-any-return]

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return products.by_pieces(run, x, [getattr(self, name) for name in names], cut, dim)

    replace_method(module, MethodType(forward, module), by=AXIS)


def _dropout(module: nn.Dropout, cut: LayerCut, dim: int) -> None:
    """Let a dropout on this rank's part along `dim` draw what one process draws."""
    cuts = [] if cut.group is None else [(cut, dim)]
    if cut.within is not None:
        cuts.append((cut.within, getattr(module, "sequence_dim", SEQUENCE)))
    products.cut_dropout(module, cuts, by=AXIS)


# way of a plan → what makes a layer of it compute this rank's part
MAKE: dict[str, Callable[[nn.Module, LayerCut], None]] = {
    "column": _linear(products.column_linear),
    "heads": _linear(products.column_linear),
    "row": _row,
    "vocabulary": _vocabulary,
    "head": _linear(products.head_linear),
    "loss": _loss,
    "routed": _routed,
    "experts": _experts,
    "scope": _scope,
    "inner": lambda module, cut: _by_pieces(module, cut, getattr(module, "heads_dim", -2)),
    "sequence": _sequence,
}
