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
ranks, also on one, and the blocks' sums are added as one tree: see
`lockstep.parallel.tensor.products`. What a cut layer computes is in
`lockstep.parallel.tensor.layers`.

Tests: tests/parity/test_tensor.py, tests/parallel/test_worked_examples.py
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.config import StepConfig
from lockstep.models.hf_layers import fit_heads, fit_units, is_transposed, refuse_attention_dropout
from lockstep.parallel.facts import ModelFacts
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.tensor.layer_cut import LayerCut, OnSend
from lockstep.parallel.tensor.layers import AXIS, MAKE, check_divides, fuse, repeat_heads, weight_of
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
            self._along = self.mesh[AXIS]
            self._along_both = self.mesh[AXIS, "shard"]

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
        check_divides(name, parameter.shape[dim], unit, self.cut)
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

    Args:
        facts: of the model.
        mesh: None: one rank computes in blocks.
        config: how many blocks, and whether sequences are cut between layers.
        within: how the sequences are cut, of which a rank has its part.
        own_loss: the loss is the model's own method.
        on_send: called with the bytes of each message, in a dry run.

    Raises:
        UsageError: the model has no plan, or a layer does not divide.
    """
    distributed = config.distributed
    model = facts.model
    names = facts.names
    plan = facts.tensor_plan
    if mesh is not None:
        refuse_attention_dropout(model)
    cut = LayerCut(
        None if mesh is None else mesh[AXIS].get_group(),
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
            MAKE[way](module, cut)
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
    fuse(module, name, unit, cut)
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
    heads = weight_of(module).shape[0] // width
    copies = _copies(heads, most_heads[around], cut)
    if not copies:
        return False
    if hasattr(around, "num_key_value_groups"):  # of transformers
        around.num_key_value_groups = most_heads[around] // (heads * copies)  # type: ignore[assignment]
    repeat_heads(module, width, copies, cut)
    return True


def _most_heads(plan: TensorPlan) -> dict[nn.Module, int]:
    """Return module → the most heads of a layer in it: those of queries, where keys have fewer."""
    most: dict[nn.Module, int] = {}
    for name, module, _, way in plan.layers:
        if way == "heads":
            around, width = plan.heads[name]
            most[around] = max(most.get(around, 0), weight_of(module).shape[0] // width)
    return most


def _copies(heads: int, most: int, cut: LayerCut) -> int:
    """Return how often each head of keys and values is computed, or 0 for no repetition.

    Heads are repeated where they are fewer than the parts.
    """
    # In blocks, as many copies as there are blocks of queries, not ranks: what is computed must not
    # depend on the ranks.
    parts = cut.ranks if cut.blocks is None else math.gcd(most, cut.blocks)
    if heads >= parts or parts % heads or most % cut.ranks:
        return 0
    return parts // heads


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
