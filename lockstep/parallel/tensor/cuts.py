"""Tensor parallel: cuts layers over the ranks of the axis `tensor` by a model's `tensor_plan`.

A block of width 6 with two heads of 3 on two ranks. Weights are [outputs, inputs]:

    layer                  way in the plan    complete   here      what rank 1 holds
    attention.query        heads              [6, 6]     [3, 6]    the rows of head 1
    attention.out          row                [6, 6]     [6, 3]    the columns 3 to 5
    mlp.up, mlp.up.bias    column             [4, 6]     [2, 6]    the rows 2 and 3, and their bias
    mlp.down               row                [6, 4]     [6, 2]    the columns 2 and 3
    norm                   sequence           [6]        [6]       all of it

An optimizer trains DTensors of the complete shapes (`train_whole`), so that norms, clipping and
checkpoints see what one process has: [4, 6], of which this rank's piece is two rows.

The gradient of `mlp.up`, of tensor:2 × fsdp:2 on four ranks, between backward and update:

    backward               [2, 6] on each rank, of its rows and of its micro-batch
    FSDP2's reduce-scatter [1, 6], the sum over the two ranks along `shard`; in each backward pass
    `sum_over_ranks`       nothing for it; for a `partial` one (below) the sum along `tensor`
    `hand_over`            the `.grad` of the DTensor that is trained: of its rows one is here
    norm, clip, update     over both axes: each element of [4, 6] is on one rank, and counts once

A complete parameter that saw a part of the work has a part of its gradient (`partial`): `norm`
under sequence parallel, whose tokens are other ones on each rank, and keys of fewer heads than
ranks. `sum_over_ranks` adds these up once a step.

Under `reproducible` the layers of the plan are computed in `tensor_blocks` blocks on any number of
ranks, also on one, and the blocks' sums are added as one tree (`lockstep.parallel.tensor.blocks`).

Tests: tests/parity/test_tensor.py, tests/parallel/test_worked_examples.py
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.config import StepConfig
from lockstep.config.checks import divisors
from lockstep.errors import UsageError
from lockstep.models.hf_layers import fit_heads, fit_units, is_transposed, refuse_attention_dropout
from lockstep.models.language import TokenLosses
from lockstep.models.mixture import through_experts
from lockstep.parallel.changes import replace_method
from lockstep.parallel.facts import ModelFacts
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.tensor import blocks as tensor_blocks
from lockstep.parallel.tensor.blocks import SEQUENCE, LayerCut, OnSend
from lockstep.parallel.tensor.loss_parallel import cut_token_losses
from lockstep.parallel.tensor.plan import PRODUCTS, TensorPlan
from lockstep.tensors import local

_BUCKET = 1 << 24  # numbers that are summed in one message, and copied for it


@dataclass
class TensorCuts:
    """The parameters that are cut over the axis `tensor`."""

    mesh: DeviceMesh | None  # the whole mesh; None where one rank computes in blocks
    cut: LayerCut  # how
    dims: dict[str, int] = field(default_factory=dict)  # canonical name → the dim that is cut
    # canonical name → the complete shape
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    # complete parameters, of whose gradient a rank has its part
    partial: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        # each takes half a millisecond, and `whole` is called for each gradient
        if self.mesh is not None:
            self._along = self.mesh["tensor"]
            self._along_both = self.mesh["tensor", "shard"]

    def piece(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's piece of a parameter's value, in memory of its own.

        All of it where it is not cut.
        """
        if name not in self.dims or self.cut.group is None:
            return full
        piece = full.chunk(self.cut.ranks, self.dims[name])[self.cut.rank]
        # fused updates run over the memory as it lies
        return piece.clone(memory_format=torch.contiguous_format)

    def cut_value(self, name: str, parameter: nn.Parameter, dim: int, unit: int) -> None:
        """Keep this rank's piece of a parameter, in place.

        Args:
            name: its canonical name; a tied weight is cut once, under whichever name comes first.
            parameter: with its complete value.
            dim: along which it is cut.
            unit: how many rows must stay together: the width of a head, or 1.
        """
        if name in self.dims:
            return
        _check_divides(name, parameter.shape[dim], unit, self.cut)
        self.dims[name] = dim
        self.shapes[name] = parameter.shape
        parameter.data = self.piece(name, parameter.data)

    def add_partial(self, names: Mapping[int, str], parameters: Iterable[nn.Parameter]) -> None:
        """Note complete parameters of whose gradient a rank has a part, which ranks then add up.

        In blocks each rank computes the sum itself.

        Args:
            names: id of a parameter → its canonical name.
            parameters: that see a part of the heads, or of the sequence.
        """
        if self.cut.blocks is None:
            self.partial |= {names[id(parameter)] for parameter in parameters}

    def whole(self, name: str, piece: Tensor) -> DTensor:
        """Return the complete tensor of which this rank has `piece`.

        The piece may be sharded once more over the axis `shard`.
        """
        if name not in self.dims:  # optimizers take DTensors or plain tensors, not both
            return DTensor.from_local(piece, self._along, [Replicate()], run_check=False)
        shape = self.shapes[name]
        dim = Shard(self.dims[name])
        strides = torch.empty(shape, device="meta").stride()
        mesh = self._along
        placements = [dim]
        # FSDP2 has sharded this rank's piece: [4, 6] → [2, 6] over tensor → [1, 6] over shard.
        if isinstance(piece, DTensor):
            mesh = self._along_both
            placements = [dim, *piece.placements[-1:]]  # type: ignore[list-item]
            piece = piece.to_local()
        return DTensor.from_local(
            piece, mesh, placements, run_check=False, shape=shape, stride=strides
        )


def apply_tensor(
    facts: ModelFacts,
    mesh: DeviceMesh | None,
    config: StepConfig,
    within: LayerCut | None = None,
    *,
    own_loss: bool = True,
    on_send: OnSend | None = None,
) -> TensorCuts:
    """Cut the layers of a model in place, by its own plan.

    A UsageError if it has none, or a layer does not divide.

    Without a `mesh` one rank computes in blocks. `within`: how the sequences are cut, of which a
    rank has its part; `own_loss`: the loss is the model's own method.
    """
    distributed = config.distributed
    model = facts.model
    names = facts.names
    plan = facts.tensor_plan
    if mesh is not None:
        refuse_attention_dropout(model)
    cut = LayerCut(
        None if mesh is None else mesh["tensor"].get_group(),
        distributed.blocks_of_layers if distributed.reproducible else None,
        sequence=distributed.cuts_sequences_between_layers
        and {"vocabulary", "sequence", "head"} <= plan.ways,
        within=within,
        keeps_logits=own_loss and plan.has_loss,
        on_send=on_send,
    )
    cuts = TensorCuts(mesh, cut)
    most_heads = _most_heads(plan)
    for name, module, attribute, way in plan.layers:
        if way.startswith("fused"):
            _cut_fused(model, plan, name, module, way, cut)
            cuts.add_partial(names, module.parameters())
            continue

        if attribute is None:
            _MAKE[way](module, cut)
        if way == "heads" and _repeats_heads(plan, name, module, most_heads, cut):
            cuts.add_partial(names, module.parameters())
            continue

        unit = plan.heads[name][1] if way == "heads" else 1
        for parameter, dim in _cut_parameters(module, attribute, way):
            cuts.cut_value(names[id(parameter)], parameter, dim, unit)
        cuts.add_partial(names, _partial_parameters(module, way, cut))
    return cuts


def _cut_fused(
    model: nn.Module, plan: TensorPlan, name: str, module: Any, way: str, cut: LayerCut
) -> None:
    """Let a layer that holds several, as q, k and v, and the module around it compute parts."""
    unit = plan.heads[name][1] if way == "fused_heads" else 1
    _fuse(module, name, unit, cut)
    around = model.get_submodule(name.rpartition(".")[0])
    if way == "fused_heads":
        fit_heads(around, cut.ranks)
    else:
        fit_units(around)


def _repeats_heads(
    plan: TensorPlan,
    name: str,
    module: nn.Module,
    most_heads: Mapping[nn.Module, int],
    cut: LayerCut,
) -> bool:
    """Return whether each rank keeps all heads of a layer, which are fewer than the ranks.

    If so, the layer computes those that this rank's queries attend to. 8 heads of queries and 2 of
    keys on 4 ranks: rank 1 has queries 2 and 3, whose keys are those of head 0.
    """
    around, width = plan.heads[name]
    heads = _weight(module).shape[0] // width
    copies = _copies(heads, most_heads[around], cut)
    if not copies:
        return False
    if hasattr(around, "num_key_value_groups"):  # of transformers
        around.num_key_value_groups = most_heads[around] // (heads * copies)  # type: ignore[assignment]
    _repeat_heads(module, width, copies, cut)
    return True


def _most_heads(plan: TensorPlan) -> dict[nn.Module, int]:
    """Return module → the most heads of a layer in it: those of queries, where keys have fewer."""
    most: dict[nn.Module, int] = {}
    for name, module, _, way in plan.layers:
        if way == "heads":
            around, width = plan.heads[name]
            most[around] = max(most.get(around, 0), _weight(module).shape[0] // width)
    return most


def _copies(heads: int, most: int, cut: LayerCut) -> int:
    """Return how often each head of keys and values is computed, or 0 for no repetition.

    Heads are repeated where they are fewer than the parts.
    """
    # In blocks, as many copies as there are blocks of queries, not ranks: what is computed must not
    # depend on the ranks.
    parts = cut.ranks if cut.blocks is None else math.gcd(most, cut.blocks)
    return parts // heads if heads < parts and parts % heads == 0 and most % cut.ranks == 0 else 0


def _repeat_heads(module: nn.Module, width: int, copies: int, cut: LayerCut) -> None:
    """Keep a layer of few heads complete on each rank; compute heads that its queries attend to."""

    def forward(self: Any, x: Tensor, *given: Tensor) -> Tensor:
        weight, bias = (given[0], None) if given else (self.weight, self.bias)
        heads = weight.shape[0] // width
        bias = None if bias is None else tensor_blocks.repeated_heads(bias, heads, copies, cut)
        return tensor_blocks.column_linear(
            x, tensor_blocks.repeated_heads(weight, heads, copies, cut), bias, cut
        )

    _replace(module, forward)


def _fuse(module: Any, name: str, unit: int, cut: LayerCut) -> None:
    """Keep a weight of several layers complete on each rank; compute this rank's part of each."""
    # As many parts as all of its layers have: queries of 8 heads, keys and values of 2 have two.
    parts = math.gcd(*(size // unit for size in module.fused_sizes))
    _check_divides(f"{name}.weight", parts * unit, unit, cut)

    def forward(self: Any, x: Tensor) -> Tensor:
        """Multiply by several layers' weights that are fused into one, [parts of q, k, v, …]."""
        weight = tensor_blocks.fused_rows(_weight(self), self.fused_sizes, parts, cut)
        bias = (
            None
            if self.bias is None
            else tensor_blocks.fused_rows(self.bias, self.fused_sizes, parts, cut)
        )
        fused = tensor_blocks.column_linear(x, weight, bias, cut).unflatten(
            -1, (parts // cut.ranks, -1)
        )  # type: ignore[no-untyped-call]
        # [q0 q1 k0 v0] of each part → all queries, then all keys, then all values
        layers = fused.split([size // parts for size in self.fused_sizes], -1)
        return torch.cat([layer.flatten(-2) for layer in layers], -1)

    replace_method(module, MethodType(forward, module), by="tensor")


def _weight(module: Any) -> Tensor:
    weight: Tensor = module.weight
    return weight.t() if is_transposed(module) else weight


def _check_divides(name: str, size: int, unit: int, cut: LayerCut) -> None:
    if size % (unit * cut.ranks) == 0:
        return
    parts = f"{size // unit} heads" if unit > 1 else f"{size} rows or columns"
    what = f"{name} has {parts}, which {cut.ranks} ranks can't share"
    sizes = " or ".join(map(str, divisors(math.gcd(size // unit, cut.ranks), cut.ranks)))
    fix = f"write tensor_size: {sizes}, or give the model a multiple of {cut.ranks}"
    raise UsageError(what, where="distributed.tensor_size", fix=fix)


def _cut_parameters(
    module: nn.Module, attribute: str | None, way: str
) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield a layer's parameters that ranks hold parts of, each with the dim that is cut."""
    if attribute is not None:
        yield getattr(module, attribute), 0
    elif way in ("experts", "routed"):
        yield from ((parameter, 0) for parameter in module.parameters())
    elif way in PRODUCTS:
        if getattr(module, "weight", None) is not None:
            yield module.weight, int((way == "row") != is_transposed(module))  # type: ignore[misc]
        if way in ("column", "heads", "head") and getattr(module, "bias", None) is not None:
            yield module.bias, 0  # type: ignore[misc]


def _partial_parameters(module: nn.Module, way: str, cut: LayerCut) -> Iterator[nn.Parameter]:
    """Yield complete parameters that see only a part of the heads, or of the sequence.

    One process sees all of it.
    """
    if way == "inner" or (way == "sequence" and cut.sequence):
        yield from module.parameters()
    elif way == "row" and cut.sequence and getattr(module, "bias", None) is not None:
        yield module.bias  # type: ignore[misc]


def _linear(
    product: Callable[[Tensor, Tensor, Tensor | None, LayerCut], Tensor],
) -> Callable[[nn.Module, LayerCut], None]:
    """Return what makes a linear layer multiply by `product`, on this rank's part of the weight."""

    def make(module: nn.Module, cut: LayerCut) -> None:
        def forward(self: Any, x: Tensor, *given: Tensor) -> Tensor:
            return (
                product(x, given[0], None, cut)
                if given
                else product(x, _weight(self), self.bias, cut)
            )

        _replace(module, forward)

    return make


def _row(module: nn.Module, cut: LayerCut) -> None:
    """Let a layer whose inputs are shared out multiply: ranks' products are parts of a sum.

    x [B, T, K / ranks] by weight [N, K / ranks] → [B, T, N], once the ranks have added theirs.
    """

    def forward(self: Any, x: Tensor, *given: Tensor) -> Tensor:
        y = tensor_blocks.row_linear(x, given[0] if given else _weight(self), cut)
        if given or self.bias is None:
            return y
        # After the sum, or each rank would add it. Of a part of the tokens its gradient is a part,
        # too: where bits count it is summed piece by piece.
        bias: Tensor = self.bias.to(y.dtype)
        if cut.blocks is None or not cut.sequence:
            return y + bias
        return tensor_blocks.by_pieces(torch.add, y, (bias,), cut, SEQUENCE)

    _replace(module, forward)


def _vocabulary(module: nn.Module, cut: LayerCut) -> None:
    def forward(self: Any, ids: Tensor, *given: Tensor) -> Tensor:
        weight = given[0] if given else self.weight
        return tensor_blocks.vocabulary_lookup(ids, weight, cut, getattr(self, "padding_idx", None))

    _replace(module, forward)


def _loss(module: nn.Module, cut: LayerCut) -> None:
    def forward(self: Any, logits: Tensor, targets: Tensor) -> Tensor:
        terms = self.terms if isinstance(self, TokenLosses) else (0.0, 0.0)
        return cut_token_losses(logits, targets, cut, terms)

    if isinstance(module, TokenLosses) and cut.sequence and cut.blocks is not None:
        module.cut_into(cut.blocks // cut.ranks)
    if cut.keeps_logits:
        replace_method(module, MethodType(forward, module), by="tensor")


def _experts(module: nn.Module, cut: LayerCut) -> None:
    if cut.group is None:
        return
    before: Callable[..., Tensor] = module.forward.__func__  # type: ignore[attr-defined]  # its self may be a stand-in

    def forward(self: nn.Module, rows: Tensor, counts: list[int]) -> Tensor:
        return tensor_blocks.experts_apart(MethodType(before, self), rows, counts, cut)

    replace_method(module, MethodType(forward, module), by="tensor")


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
        apart = own if cut.group is None else partial(tensor_blocks.experts_apart, own, cut=cut)
        return through_experts(apart, tokens, chosen, weights, counts)  # type: ignore[no-any-return]

    replace_method(module, MethodType(forward, module), by="tensor")


def _scope(module: nn.Module, cut: LayerCut) -> None:
    """Let a module enter and leave its heads by those of this rank."""

    def enter(_self: Any, x: Tensor, heads: int) -> Tensor:
        return tensor_blocks.enter_heads(x, heads, cut)

    def leave(_self: Any, parts: Tensor) -> Tensor:
        return tensor_blocks.leave_heads(parts, cut)

    replace_method(module, MethodType(enter, module), by="tensor", method="enter")
    replace_method(module, MethodType(leave, module), by="tensor", method="leave")
    for inner in module.modules():
        if isinstance(inner, nn.Dropout):
            _dropout(inner, cut, 0)


def _sequence(module: nn.Module, cut: LayerCut) -> None:
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
        return tensor_blocks.by_pieces(run, x, [getattr(self, name) for name in names], cut, dim)

    replace_method(module, MethodType(forward, module), by="tensor")


def _dropout(module: nn.Dropout, cut: LayerCut, dim: int) -> None:
    cuts = [] if cut.group is None else [(cut, dim)]
    if cut.within is not None:
        cuts.append((cut.within, getattr(module, "sequence_dim", SEQUENCE)))
    tensor_blocks.cut_dropout(module, cuts, by="tensor")


def _replace(module: nn.Module, run: Callable[..., Tensor]) -> None:
    """Replace a module's method `product`, which is given the weight, or else `forward`.

    A method of the instance, so that a deep copy of the module has one of its own.
    """
    method = "product" if hasattr(module, "product") else "forward"
    replace_method(module, MethodType(run, module), by="tensor", method=method)


_MAKE: dict[str, Callable[[nn.Module, LayerCut], None]] = {
    "column": _linear(tensor_blocks.column_linear),
    "heads": _linear(tensor_blocks.column_linear),
    "row": _row,
    "vocabulary": _vocabulary,
    "head": _linear(tensor_blocks.head_linear),
    "loss": _loss,
    "routed": _routed,
    "experts": _experts,
    "scope": _scope,
    "inner": lambda module, cut: _by_pieces(module, cut, getattr(module, "heads_dim", -2)),
    "sequence": _sequence,
}


def train_whole(
    placed: ParallelModel,
    names: Iterable[str],
    whole: Callable[[str, Tensor], DTensor],
    complete: Callable[[], None],
) -> ParallelModel:
    """Let a placed model train complete tensors in place of this rank's pieces.

    `complete` finishes the gradients of the pieces.
    """
    own = placed.parameters
    trained = {
        name: nn.Parameter(whole(name, own[name].detach()), own[name].requires_grad)
        for name in names
    }

    def hand_over() -> None:
        for name, parameter in trained.items():
            gradient = own[name].grad
            parameter.grad = None if gradient is None else whole(name, gradient)
            own[name].grad = None

    finishers = [*placed.finishers, complete, hand_over]
    return replace(placed, parameters=own | trained, finishers=finishers)


@torch.no_grad()
def sum_over_ranks(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the parameters' gradients over a group, in place."""
    waiting: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = local(parameter.grad)
        if waiting and (
            gradient.dtype != waiting[0].dtype or sum(g.numel() for g in waiting) > _BUCKET
        ):
            _sum_together(waiting, group)
            waiting = []
        waiting.append(gradient)
    if waiting:
        _sum_together(waiting, group)


def _sum_together(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(
        gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True
    ):
        gradient.copy_(total.view_as(gradient))
