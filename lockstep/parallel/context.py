"""Context parallel: ranks of the axis `context` work on the same micro-batches, each on its part of every sequence.

Sequences are cut into chunks, two for each rank. A rank has one from the front and one from the back, as causal
attention needs more work the later its queries are: of eight chunks, four ranks have 0 7, 1 6, 2 5 and 3 4. Positions
meet in attention only: its keys and values are gathered (Llama 3, arXiv:2407.21783, section 3.3.2), and their gradients
summed where their positions are. A rank's gradients of parameters are those of its positions, and are summed over the
axis after the last backward pass of a step.

A model says with `context_plan() -> {"input_ids": 1, "targets": 1}` along which dim the parts of a batch are cut, and
that it computes each position by itself but in its `Attend` modules (`lockstep.models.attention`).

Under `reproducible` sequences are cut into `context_blocks` chunks on any number of ranks, also on one, and each layer
runs chunk by chunk: what several chunks add up to (gradients of parameters, of keys and values; losses) is summed as
one tree over the chunks, in the order above. So each layer's backward pass sums its parameters' gradients over ranks.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import StepConfig
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.models.attention import Attend
from lockstep.models.protocol import Objective, offered
from lockstep.parallel.parallel_model import ParallelModel, local
from lockstep.parallel.tensor_blocks import SEQUENCE, Cut, by_pieces, cut_dropout
from lockstep.parallel.tensor_cuts import sum_over_ranks


class Context(Cut):
    """The way in which sequences are cut.

    Attributes:
        group: the ranks over which; None: one rank, which computes in chunks.
        blocks: chunks in a sequence where bits count; else two for each rank.
        whole: set while a model is called from outside of the step, with whole sequences on every rank.
    """

    def __init__(self, group: dist.ProcessGroup | None, blocks: int | None) -> None:
        super().__init__(group, blocks, sequence=True)
        self.whole = False

    def order(self, length: int) -> list[int]:
        """Return the numbers of a sequence's chunks, as they are dealt to ranks, a run to each.

        Raises:
            UsageError: ranks can't share the sequence.
        """
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
        """Return the numbers of this rank's chunks of a sequence."""
        order = self.order(length)
        share = len(order) // self.ranks
        return order[self.rank * share : (self.rank + 1) * share]

    def part(self, whole: Tensor, dim: int = SEQUENCE) -> Tensor:
        return self._part_of(self.rank, whole, dim)

    def _part_of(self, rank: int, whole: Tensor, dim: int) -> Tensor:
        order = self.order(whole.shape[dim])
        share, chunks = len(order) // self.ranks, whole.chunk(len(order), dim)
        return torch.cat([chunks[number] for number in order[rank * share : (rank + 1) * share]], dim)

    def gathered(self, part: Tensor, dim: int = SEQUENCE) -> Tensor:
        whole = part if self.group is None else super().gathered(part, dim)
        order = self.order(whole.shape[dim])
        chunks = dict(zip(order, whole.chunk(len(order), dim), strict=True))
        return torch.cat([chunks[number] for number in range(len(order))], dim)

    def _in_rows(self, whole: Tensor) -> Tensor:
        parts = [self._part_of(rank, whole, SEQUENCE) for rank in range(self.ranks)]
        return torch.stack(parts).view(self.ranks, -1)

    def spread(self, part: Tensor, count: int) -> tuple[Tensor, ...]:
        """Return a whole sequence for each of `count` chunks of queries; their gradients are summed over all ranks'."""
        return _GatherSequence.apply(part, self, count)  # type: ignore[no-untyped-call,no-any-return]

    def total(self, losses: Tensor) -> Tensor:
        """Return the sum of this rank's losses [chunks], and of the other ranks'."""
        return _Total.apply(losses, self)  # type: ignore[no-untyped-call,no-any-return]


def context_of(model: nn.Module, layout: Layout, config: StepConfig, mesh: DeviceMesh | None) -> Context | None:
    """Return how the sequences of a model are cut over the axis `context`; None if they stay whole.

    Raises:
        UsageError: the model does not say that they can be.
    """
    blocks = config.distributed.context_blocks if config.distributed.reproducible else 1
    if layout.context == 1 and blocks == 1:
        return None
    plan_of(model)
    group = mesh["context"].get_group() if mesh is not None and layout.context > 1 else None
    return Context(group, blocks if config.distributed.reproducible else None)


def apply_context(model: nn.Module, context: Context) -> None:
    """Let a model, whose layers are cut already, run on parts of sequences.

    Raises:
        UsageError: a layer of it can't.
    """
    for name, module in model.named_modules():
        if isinstance(module, Attend):
            _attend(module, context)
        elif isinstance(module, nn.Dropout):
            if "forward" not in vars(module):  # else it is cut over `tensor`, too, and knows of this
                _dropout(module, context)
        elif context.blocks is not None:
            _by_chunks(name, module, context)


def plan_of(model: nn.Module) -> dict[str, int]:
    """Return name of a batch's part → the dim of its sequence.

    Raises:
        UsageError: the model has no plan, or no module that attends.
    """
    own = offered(model, "context_plan")
    if own is not None and any(isinstance(module, Attend) for module in model.modules()):
        plan: dict[str, int] = own()
        return plan
    missing = "does not say how its sequences are cut" if own is None else "has no lockstep.models.attention.Attend"
    raise UsageError(
        f"{type(model).__name__} {missing}",
        where="distributed.context_size",
        why="each rank has a part of every sequence, and positions meet in attention",
        fix="let its attention be self.attend = Attend(), called as self.attend(q, k, v), and give it context_plan() "
        '-> {"input_ids": 1, "targets": 1}: the dims of a batch along which its sequences lie',
    )


def cut_objective(objective: Objective, context: Context, plan: Mapping[str, int]) -> Objective:
    """Return an objective that is given whole batches, and shows the model this rank's part of their sequences.

    Its loss is that of whole sequences, on every rank.
    """
    if objective.is_mean:
        raise UsageError(
            "a loss that is a mean over some positions can't be put together from several ranks' means",
            where="distributed.context_size",
            fix="give the model loss(outputs, batch), which returns the sum over valid targets, and count(batch)",
        )

    def cut(batch: Any) -> Any:
        return {name: context.part(value, plan[name]) if name in plan else value for name, value in batch.items()}

    def loss(outputs: Any, batch: Any) -> Tensor:
        length = next(batch[name].shape[dim] for name, dim in plan.items())
        part, count = cut(batch), 1 if context.blocks is None else len(context.here(length))
        if count == 1:
            return context.total(objective.loss(outputs, part)[None])
        pieces = {name: part[name].chunk(count, dim) for name, dim in plan.items()}
        losses = [
            objective.loss(
                _chunk_of(outputs, place, count), part | {name: piece[place] for name, piece in pieces.items()}
            )
            for place in range(count)
        ]
        return context.total(torch.stack(losses))

    return replace(objective, inputs=lambda batch: objective.inputs(cut(batch)), loss=loss)


def _chunk_of(outputs: Any, place: int, count: int) -> Any:
    if isinstance(outputs, Tensor):
        return outputs.chunk(count, SEQUENCE)[place]
    return tuple(_chunk_of(each, place, count) for each in outputs)


def train_context(placed: ParallelModel, context: Context) -> None:
    """Let a placed model sum gradients over the axis, and its losses count once."""
    group, finish, forward = context.group, placed.finish_gradients, placed.forward
    own, sums_itself = list(placed.parameters.values()), context.blocks is not None

    def finish_gradients() -> None:
        finish()
        assert group is not None
        sum_over_ranks(own, group)
        if context.on_send is not None:
            numbers = sum(local(p.grad).numel() for p in own if p.grad is not None)
            context.on_send(2 * 4 * numbers * (context.ranks - 1) // context.ranks)

    def whole_sequences(*args: Any, **kwargs: Any) -> Any:
        context.whole = True
        try:
            return forward(*args, **kwargs)
        finally:
            context.whole = False

    if group is not None and not sums_itself:
        placed.finish_gradients = finish_gradients
    placed.forward = whole_sequences
    placed.adds_losses &= context.rank == 0


def _attend(module: Attend, context: Context) -> None:
    def positions(self: Attend, length: int, device: torch.device) -> Tensor:
        if context.whole:
            return torch.arange(length, device=device)
        return context.part(torch.arange(length * context.ranks, device=device), 0)

    def forward(self: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if context.whole:
            return self.run(q, k, v, 0)
        numbers = context.here(q.shape[2] * context.ranks)
        size, count = q.shape[2] // len(numbers), len(numbers)
        queries, keys, values = q.chunk(count, 2), context.spread(k, count), context.spread(v, count)
        attended = []
        for place, number in enumerate(numbers):
            last = (number + 1) * size if self.causal else k.shape[2] * context.ranks
            seen = keys[place][:, :, :last], values[place][:, :, :last]
            attended.append(self.run(queries[place], *seen, number * size))
        return torch.cat(attended, 2)

    module.positions = MethodType(positions, module)  # type: ignore[method-assign]
    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _dropout(module: nn.Dropout, context: Context) -> None:
    dim = getattr(module, "sequence_dim", SEQUENCE)

    def forward(self: nn.Dropout, x: Tensor) -> Tensor:
        if context.whole or not (self.training and self.p):
            return F.dropout(x, self.p, self.training)
        return cut_dropout(x, self.p, [(context, dim)])

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _by_chunks(name: str, module: nn.Module, context: Context) -> None:
    """Let a layer run chunk by chunk: a weight's gradient is the same sum over chunks on any number of ranks.

    Raises:
        UsageError: the layer may do more than a product of each position.
    """
    product = getattr(module, "product", None)
    if product is not None:

        def of_weight(self: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
            if context.whole:
                return inner(self, x, weight)
            return by_pieces(partial(inner, self), x, (weight,), context, SEQUENCE)

        inner: Callable[..., Tensor] = product.__func__
        module.product = MethodType(of_weight, module)  # type: ignore[assignment]
        return
    if next(module.parameters(recurse=False), None) is None:
        return
    if not isinstance(module, nn.Linear | nn.Embedding | nn.RMSNorm | nn.LayerNorm):
        raise UsageError(
            f"{name or 'the model'}, a {type(module).__name__}, owns parameters, and can't run chunk by chunk",
            where="distributed.context_blocks",
            why="under reproducible the gradient of each parameter is a sum over chunks of sequences",
            fix="put its parameters into nn.Linear, nn.Embedding, nn.RMSNorm or nn.LayerNorm, or give it "
            "product(x, weight), which its forward pass calls; or write reproducible: false",
        )
    whole_forward: Callable[..., Tensor] = module.forward.__func__  # type: ignore[union-attr]
    names = [each for each, _ in module.named_parameters(recurse=False)]

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        if context.whole:
            return whole_forward(self, x)

        def run(piece: Tensor, *weights: Tensor) -> Tensor:
            return whole_forward(_Lent(self, dict(zip(names, weights, strict=True))), piece)

        dim = SEQUENCE if x.dim() > 1 else 0  # positions [T], of a table of them
        return by_pieces(run, x, [getattr(self, each) for each in names], context, dim)

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]


class _Lent:
    """A module with other tensors in place of its own parameters."""

    def __init__(self, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        self._module, self._tensors = module, tensors

    def __getattr__(self, name: str) -> Any:
        return self._tensors[name] if name in self._tensors else getattr(self._module, name)


class _GatherSequence(torch.autograd.Function):
    """Keys or values [B, H, T / ranks, D] of all ranks, in order, for each chunk of queries."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, context: Context, count: int) -> tuple[Tensor, ...]:
        ctx.context = context
        whole = context.gathered(part.transpose(1, 2)).transpose(1, 2)
        return tuple(whole.view_as(whole) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        context: Context = ctx.context
        pulls = torch.stack([gradient.transpose(1, 2) for gradient in gradients])
        if context.blocks is None:
            pulls = pulls.sum(0, keepdim=True)
        if context.group is None:
            return context.part(context.sum(pulls)).transpose(1, 2), None, None
        return context.sum(pulls, cut=True).transpose(1, 2), None, None


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor, context: Context) -> Tensor:
        ctx.count = len(losses)
        return context.sum(losses)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].expand(ctx.count), None
