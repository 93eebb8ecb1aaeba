"""Tensor parallel: layers are cut over the ranks of the axis `tensor`, which work on the same micro-batches.

A model's `tensor_plan()` says how, by patterns of module names (Shoeybi et al. 2019, Megatron-LM, section 3):

    column      a linear layer's outputs are cut; its input is whole
    heads       the same, between heads: the module around it has `head_width` (or `head_dim`)
    row         its inputs are cut; what it returns is summed over ranks
    vocabulary  an embedding's rows are cut; a rank looks up its own ids, and the results are summed
    head        an output layer's rows are cut; the logits are gathered
    experts     a module of experts (`lockstep.models.protocol`): each rank has some of them; their rows are whole
    scope       a module calls `enter` on what its cut layers take, and `leave` on what they return
    inner       a norm between cut layers, over the width of a head: whole, with the gradients of all ranks' heads
    sequence    a norm or a dropout between cut layers: sequence parallel gives a rank a part of each sequence there,
                if the plan also has `vocabulary`, where sequences are cut, and `head`, where they are whole again

A pattern may also name a parameter: `column` cuts its first dim. Between a column cut and a row cut nothing is sent:
heads of attention and units of a feed-forward layer are apart. A module that does more than its product has it as a
method, `product(x, weight)`.

Under `reproducible` the layers of the plan are computed in `tensor_blocks` blocks on any number of ranks, also on one,
and the blocks' sums are added as one tree: the product of a block has the same bits wherever it runs
(`lockstep.parallel.tensor_blocks`).
"""

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.config import StepConfig
from lockstep.errors import UsageError
from lockstep.models.chain import look_up
from lockstep.models.hf_decoder import hf_tensor_plan, refuse_attention_dropout
from lockstep.models.protocol import offered
from lockstep.parallel.initial import canonical_names
from lockstep.parallel.parallel_model import ParallelModel, local
from lockstep.parallel.tensor_blocks import (
    SEQUENCE,
    Cut,
    by_pieces,
    column_linear,
    cut_dropout,
    enter_heads,
    experts_apart,
    head_linear,
    leave_heads,
    repeated_heads,
    row_linear,
    vocabulary_lookup,
)

_Planned = tuple[str, nn.Module, str | None, str]  # of a module: its name, itself, a parameter's attribute or None, way
_PRODUCTS = ("column", "heads", "row", "vocabulary", "head")
_BUCKET = 1 << 24  # numbers that are summed in one message, and copied for it
_PLAIN = (nn.Linear.forward, nn.Embedding.forward)


@dataclass
class TensorCuts:
    """The parameters that are cut over the axis `tensor`.

    Attributes:
        mesh: the whole mesh; None where one rank computes in blocks.
        cut: how.
        dims: canonical name → the dim that is cut.
        shapes: canonical name → the whole shape.
        partial: names of whole parameters whose gradient each rank has for its part of the sequence only.
    """

    mesh: DeviceMesh | None
    cut: Cut
    dims: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    partial: set[str] = field(default_factory=set)

    def piece(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's piece of a parameter's value, in memory of its own; the whole where it is not cut."""
        if name not in self.dims or self.cut.group is None:
            return whole
        piece = whole.chunk(self.cut.ranks, self.dims[name])[self.cut.rank]
        return piece.clone(memory_format=torch.contiguous_format)  # fused updates run over the memory as it lies

    def placed(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return name → DTensor over the memory of each cut parameter, with the whole's shape."""
        return {
            name: nn.Parameter(self.whole(name, parameter.detach()), parameter.requires_grad)
            for name, parameter in parameters.items()
            if name in self.dims or not isinstance(parameter, DTensor)
        }

    def whole(self, name: str, piece: Tensor) -> DTensor:
        """Return the whole tensor, of which `piece` is this rank's, maybe sharded once more over the axis `shard`."""
        assert self.mesh is not None
        if name not in self.dims:  # optimizers take DTensors or plain tensors, not both
            return DTensor.from_local(piece, self.mesh["tensor"], [Replicate()], run_check=False)
        shape, dim = self.shapes[name], Shard(self.dims[name])
        strides = torch.empty(shape, device="meta").stride()
        mesh, placements = self.mesh["tensor"], [dim]
        if isinstance(piece, DTensor):
            mesh, placements = self.mesh["tensor", "shard"], [dim, *piece.placements[-1:]]  # type: ignore[list-item]
            piece = piece.to_local()
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=strides)


def apply_tensor(
    model: nn.Module, mesh: DeviceMesh | None, config: StepConfig, within: Cut | None = None
) -> TensorCuts:  # fmt: skip
    """Cut the layers of a model in place, by its own plan.

    Args:
        model: with its values on every rank, or on meta.
        mesh: with the axis `tensor`; None: one rank, which computes in blocks.
        within: how the sequences are cut, of which a rank has its part.

    Raises:
        UsageError: the model has no plan, or a layer does not divide.
    """
    distributed = config.distributed
    plan = checked_plan(model)
    if mesh is not None:
        refuse_attention_dropout(model)
    cut = Cut(
        None if mesh is None else mesh["tensor"].get_group(),
        distributed.tensor_blocks if distributed.reproducible else None,
        sequence=distributed.sequence_parallel and {"vocabulary", "sequence", "head"} <= {way for *_, way in plan},
    )
    cut.within = within
    names, _ = canonical_names(model)
    cuts = TensorCuts(mesh, cut)
    most = _most_heads(model, plan)
    for name, module, attribute, way in plan:
        if attribute is None:
            _MAKE[way](module, cut)
        unit = 1
        if way == "heads":
            around, unit = _around(model, name)
            heads = _rows(module) // unit
            copies = _copies(heads, most[around], cut)
            if copies:
                if hasattr(around, "num_key_value_groups"):  # of transformers
                    around.num_key_value_groups = most[around] // (heads * copies)  # type: ignore[assignment]
                _repeat_heads(module, unit, copies, cut)
                cuts.partial |= {names[id(p)] for p in module.parameters()} if cut.blocks is None else set()
                continue
        for parameter, dim in _cut_parameters(module, attribute, way):
            full = names[id(parameter)]
            if full not in cuts.dims:
                _check_divides(full, parameter.shape[dim], unit, cut)
                cuts.dims[full], cuts.shapes[full] = dim, parameter.shape
                parameter.data = cuts.piece(full, parameter.data)
        if cut.blocks is None:
            cuts.partial |= {names[id(parameter)] for parameter in _partial_parameters(module, way, cut)}
    return cuts


def plan_of(model: nn.Module) -> dict[str, str] | None:
    """Return a model's plan: its own, or that of transformers for its family; None: it has none."""
    own = offered(model, "tensor_plan")
    plan: dict[str, str] | None = hf_tensor_plan(model) if own is None else own()
    return plan


def checked_plan(model: nn.Module) -> list[_Planned]:
    """Return what the model's plan names, after checking that its layers can be cut in these ways.

    Raises:
        UsageError: one can't, or there is no plan.
    """
    plan = list(_planned(model))
    for name, module, attribute, way in plan:
        own = type(module).forward
        if way in _PRODUCTS and attribute is None and not hasattr(module, "product") and own not in _PLAIN:
            raise UsageError(
                f"{name}, a {type(module).__name__}, has a forward pass of its own, of which its product can't be cut",
                where="distributed.tensor_size",
                fix="give it a method product(x, weight), which its forward pass calls, or leave it out of the plan",
            )
        if way == "sequence" and not isinstance(module, nn.RMSNorm | nn.LayerNorm | nn.Dropout):
            raise UsageError(
                f'tensor_plan() says "sequence" of {name}, a {type(module).__name__}',
                where="distributed.sequence_parallel",
                fix="say so of nn.RMSNorm, nn.LayerNorm and nn.Dropout only",
            )
        if way == "heads":
            _around(model, name)
    return plan


def _planned(model: nn.Module) -> Iterator[_Planned]:
    """Yield (name, module, attribute, way) for each module, or parameter `attribute` of one, that the plan names."""
    plan = plan_of(model)
    if plan is None:
        raise UsageError(
            f"{type(model).__name__} does not say how its layers are cut",
            where="distributed.tensor_size",
            fix='give the model tensor_plan() -> {"layers.*.attention.query": "heads", "layers.*.attention.out": "row"}'
            f"; the ways are {', '.join(_MAKE)}",
        )
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for pattern, way in plan.items():
        expression = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
        found = [name for name in modules if expression.fullmatch(name)]
        of_parameters = [name for name in parameters if expression.fullmatch(name)]
        if way not in _MAKE or not (found or of_parameters):
            raise UsageError(
                f"tensor_plan() of {type(model).__name__} says {pattern!r}: {way!r}",
                why="there is no such way" if way not in _MAKE else "no module has such a name",
                fix=f"write one of {', '.join(_MAKE)}" if way not in _MAKE else "* stands for one part of a name",
            )
        yield from ((name, modules[name], None, way) for name in found)
        for name in of_parameters:
            owner, _, attribute = name.rpartition(".")
            yield owner, modules[owner], attribute, way


def _around(model: nn.Module, name: str) -> tuple[nn.Module, int]:
    """Return the module around a layer that is cut by heads, and the width of a head."""
    around = model.get_submodule(name.rpartition(".")[0])
    width = getattr(around, "head_width", None) or getattr(around, "head_dim", None)
    if not isinstance(width, int):
        raise UsageError(
            f'tensor_plan() of {type(model).__name__} says {name!r}: "heads"',
            why=f"{type(around).__name__}, the module around it, has no head_width",
            fix="give it the width of a head, in numbers, as self.head_width",
        )
    return around, width


def _most_heads(model: nn.Module, plan: list[_Planned]) -> dict[nn.Module, int]:
    """Return module → the most heads that a layer of it has: those of queries, where keys have fewer."""
    most: dict[nn.Module, int] = {}
    for name, module, _, way in plan:
        if way == "heads":
            around, width = _around(model, name)
            most[around] = max(most.get(around, 0), _rows(module) // width)
    return most


def _rows(linear: nn.Module) -> int:
    weight = linear.weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


def _copies(heads: int, most: int, cut: Cut) -> int:
    """Return how often each head of keys and values is computed where they are fewer than the parts; else 0."""
    parts = cut.ranks if cut.blocks is None else math.gcd(most, cut.blocks)
    return parts // heads if heads < parts and parts % heads == 0 and most % cut.ranks == 0 else 0


def _repeat_heads(module: nn.Module, width: int, copies: int, cut: Cut) -> None:
    """Hold a layer of few heads whole on every rank, and compute those that this rank's queries attend to."""

    def forward(self: Any, x: Tensor) -> Tensor:
        heads = self.weight.shape[0] // width
        weight = repeated_heads(self.weight, heads, copies, cut)
        bias = None if self.bias is None else repeated_heads(self.bias, heads, copies, cut)
        return column_linear(x, weight, bias, cut)

    def of_weight(_self: Any, x: Tensor, weight: Tensor) -> Tensor:
        heads = weight.shape[0] // width
        return column_linear(x, repeated_heads(weight, heads, copies, cut), None, cut)

    _replace(module, forward, of_weight)


def _check_divides(name: str, size: int, unit: int, cut: Cut) -> None:
    if size % (unit * cut.ranks) == 0:
        return
    parts = f"{size // unit} heads" if unit > 1 else f"{size} rows or columns"
    raise UsageError(
        f"{name} has {parts}, which {cut.ranks} ranks can't share",
        where="distributed.tensor_size",
        fix=f"write a divisor of {size // unit}",
    )


def _cut_parameters(module: nn.Module, attribute: str | None, way: str) -> Iterator[tuple[nn.Parameter, int]]:
    """Yield the parameters that are cut, with the dim."""
    if attribute is not None:
        yield getattr(module, attribute), 0
    elif way == "experts":
        yield from ((parameter, 0) for parameter in module.parameters())
    elif way in _PRODUCTS:
        if getattr(module, "weight", None) is not None:
            yield module.weight, 1 if way == "row" else 0  # type: ignore[misc]
        if way in ("column", "heads", "head") and getattr(module, "bias", None) is not None:
            yield module.bias, 0  # type: ignore[misc]


def _partial_parameters(module: nn.Module, way: str, cut: Cut) -> Iterator[nn.Parameter]:
    """Yield whole parameters that see a part of what one process sees: of the heads, or of the sequence."""
    if way == "inner" or (way == "sequence" and cut.sequence):
        yield from module.parameters()
    elif way == "row" and cut.sequence and getattr(module, "bias", None) is not None:
        yield module.bias  # type: ignore[misc]


def _linear(product: Callable[[Tensor, Tensor, Tensor | None, Cut], Tensor]) -> Callable[[nn.Module, Cut], None]:
    def make(module: nn.Module, cut: Cut) -> None:
        def forward(self: Any, x: Tensor) -> Tensor:
            return product(x, self.weight, self.bias, cut)

        def of_weight(self: Any, x: Tensor, weight: Tensor) -> Tensor:
            return product(x, weight, None, cut)

        _replace(module, forward, of_weight)

    return make


def _row(module: nn.Module, cut: Cut) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = row_linear(x, self.weight, cut)
        if self.bias is not None and cut.blocks is not None and cut.sequence:
            return by_pieces(torch.add, y, (self.bias.to(y.dtype),), cut, SEQUENCE)
        return y if self.bias is None else y.add(self.bias.to(y.dtype))

    def of_weight(_self: Any, x: Tensor, weight: Tensor) -> Tensor:
        return row_linear(x, weight, cut)

    _replace(module, forward, of_weight)


def _vocabulary(module: nn.Module, cut: Cut) -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        return vocabulary_lookup(ids, self.weight, cut, self.padding_idx)

    def of_weight(self: Any, ids: Tensor, weight: Tensor) -> Tensor:
        return vocabulary_lookup(ids, weight, cut)

    _replace(module, forward, of_weight)


def _experts(module: nn.Module, cut: Cut) -> None:
    if cut.group is None:
        return
    plain, names = copy.copy(module), [name for name, _ in module.named_parameters()]

    def forward(self: nn.Module, rows: Tensor, counts: list[int]) -> Tensor:
        own = {name: look_up(self, name) for name in names}

        def run(rows: Tensor, counts: list[int]) -> Tensor:
            made: Tensor = torch.func.functional_call(plain, own, (rows, counts))
            return made

        return experts_apart(run, rows, counts, cut)

    _replace(module, forward, None)


def _scope(module: nn.Module, cut: Cut) -> None:
    module.enter = MethodType(lambda _self, x, heads: enter_heads(x, heads, cut), module)  # type: ignore[assignment]
    module.leave = MethodType(lambda _self, parts: leave_heads(parts, cut), module)  # type: ignore[assignment]
    for inner in module.modules():
        if isinstance(inner, nn.Dropout):
            _dropout(inner, cut, 0)


def _sequence(module: nn.Module, cut: Cut) -> None:
    if not cut.sequence:
        return
    if isinstance(module, nn.Dropout):
        _dropout(module, cut, SEQUENCE)
    else:
        _by_pieces(module, cut, SEQUENCE)


def _inner(module: nn.Module, cut: Cut) -> None:
    _by_pieces(module, cut, -2)


def _by_pieces(module: nn.Module, cut: Cut, dim: int) -> None:
    """Let a norm run piece by piece where bits count: a weight's gradient is the same sum over pieces on any ranks."""
    if cut.blocks is None:
        return
    whole, names = copy.copy(module), [name for name, _ in module.named_parameters()]

    def run(piece: Tensor, *weights: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(whole, dict(zip(names, weights, strict=True)), (piece,))
        return y

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return by_pieces(run, x, [getattr(self, name) for name in names], cut, dim)

    _replace(module, forward, None)


def _dropout(module: nn.Dropout, cut: Cut, dim: int) -> None:
    """Draw the whole tensor's random numbers, and keep this rank's."""
    sequence_dim = getattr(module, "sequence_dim", SEQUENCE)

    def forward(self: nn.Dropout, x: Tensor) -> Tensor:
        if not (self.training and self.p) or (cut.group is None and cut.within is None):
            return F.dropout(x, self.p, self.training)
        outer = [] if cut.within is None else [(cut.within, sequence_dim)]
        return cut_dropout(x, self.p, [(cut, dim), *outer])

    _replace(module, forward, None)


def _replace(module: nn.Module, forward: Callable[..., Tensor], product: Callable[..., Tensor] | None) -> None:
    """Replace a module's product: its method `product`, if it has one, else its forward pass.

    A method of the instance, so that a deep copy of the module has one of its own.
    """
    if product is not None and hasattr(module, "product"):
        module.product = MethodType(product, module)  # type: ignore[assignment]
    else:
        module.forward = MethodType(forward, module)


_MAKE: dict[str, Callable[[nn.Module, Cut], None]] = {
    "column": _linear(column_linear), "heads": _linear(column_linear), "row": _row, "vocabulary": _vocabulary,
    "head": _linear(head_linear), "experts": _experts, "scope": _scope, "inner": _inner, "sequence": _sequence,
}  # fmt: skip


def train_cuts(placed: ParallelModel, cuts: TensorCuts) -> None:
    """Let a placed model train DTensors in place of this rank's pieces, and count each element once over the axis.

    Args:
        placed: by a strategy that knows nothing of the axis.
        cuts: which parameters are cut.
    """
    group = cuts.cut.group
    if group is None:
        return
    own, finish = placed.parameters, placed.finish_gradients
    trained = cuts.placed(own)
    partial = [own[name] for name in sorted(cuts.partial & set(own))]

    def finish_gradients() -> None:
        finish()
        sum_over_ranks(partial, group)
        for name, parameter in trained.items():
            gradient = own[name].grad
            parameter.grad = None if gradient is None else cuts.whole(name, gradient)
            own[name].grad = None

    placed.parameters, placed.finish_gradients = own | trained, finish_gradients
    placed.norm_groups = [*placed.norm_groups, group]
    placed.adds_losses &= cuts.cut.rank == 0
    if cuts.cut.rank:  # of what all ranks along the axis hold whole, the first counts it
        placed.counted = (set(own) if placed.counted is None else placed.counted) & set(cuts.dims)


@torch.no_grad()
def sum_over_ranks(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Sum the parameters' gradients over a group, in place."""
    waiting: list[Tensor] = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        gradient = local(parameter.grad)
        if waiting and (gradient.dtype != waiting[0].dtype or sum(g.numel() for g in waiting) > _BUCKET):
            _sum_together(waiting, group)
            waiting = []
        waiting.append(gradient)
    if waiting:
        _sum_together(waiting, group)


def _sum_together(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    for gradient, total in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))
