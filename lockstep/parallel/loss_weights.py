"""The weights of a loss function, which every rank holds in full, and their gradients.

The loss is computed after the model's forward pass.

The gradients of a micro-batch are taken after its backward pass. Once a step they are summed over
the ranks that share out its micro-batches; under a pipeline all ranks take part, and those that
compute no loss add nothing. Where bits count the sum is the tree's
(`lockstep.parallel.reproducible.tree`).

Tests: tests/parity/test_loss_weights.py
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lockstep.errors import UsageError, listed
from lockstep.layout import Layout
from lockstep.models.loss_modules import PREFIX, LossModule
from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.reproducible.tree import (
    Partials,
    clear_zero_signs,
    nodes_of_owners,
    tree_all_reduce,
)
from lockstep.process_group.collectives import create_group


class LossWeights(AroundMicroBatch):
    """The weights of the loss function of one rank, and their gradients in a step.

    Args:
        loss: the loss function, read before the model was placed.
        reproducible: sum up the tree.
    """

    def __init__(self, loss: LossModule, *, reproducible: bool) -> None:
        self.module = loss.module
        self.own = dict(loss.weights)
        self.buffers = dict(loss.buffers)
        self.scale = 1.0
        # DTensors where the model's parameters are
        self.placed: dict[str, nn.Parameter] = dict(self.own)
        self._reproducible = reproducible
        self._leaves = 0
        self._alone = False  # gradients stay in `.grad`, as backward passes add them up
        self._ranks = 1  # whose gradients are summed
        self._group: dist.ProcessGroup | None = None  # of these; None: all ranks
        self._forget()

    def _forget(self) -> None:
        self._sums: list[Tensor | None] = [None] * len(self.own)
        self._partials = Partials(self._leaves)
        self._indices: list[int] = []  # of the micro-batches of the step that this rank has run

    @property
    def any(self) -> bool:
        """Return whether there is a weight that trains."""
        return bool(self.own)

    def share(self, layout: Layout, *, alone: bool, scale: float) -> None:
        """Sum over the ranks that work on the same pieces of micro-batches; all ranks call it.

        With `alone` each rank trains a model of its own. `scale` undoes the factor of a strategy
        whose own reduction is a mean.
        """
        self.scale = scale
        each = layout.same_batch_size
        self._alone = alone
        self._ranks = 1 if alone else layout.world_size // each
        if self._ranks > 1 and each > 1:
            self._group = create_group(
                "loss", [range(piece, layout.world_size, each) for piece in range(each)]
            )

    def to_fake(self) -> None:
        """Take fake tensors in place of all of the module's, which has no values in a plan.

        A copy of it is used.
        """
        for module in self.module.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(
                    module, name, nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
                )
            for name, buffer in list(module.named_buffers(recurse=False)):
                setattr(module, name, torch.empty_like(buffer))
        self.own = {name: self.module.get_parameter(name.removeprefix(PREFIX)) for name in self.own}
        self.buffers = {
            name: self.module.get_buffer(name.removeprefix(PREFIX)) for name in self.buffers
        }
        self.placed = dict(self.own)

    # ---- a step ----

    def begin(self, micro_batches_per_step: int) -> None:
        """Begin a step, unless it has begun."""
        if self._leaves != micro_batches_per_step:
            self._leaves = micro_batches_per_step
            self._forget()

    def before(self, passing: MicroBatchPass) -> None:
        """Begin a step with its first micro-batch."""
        self.begin(passing.micro_batches_per_step)

    def after(self, passing: MicroBatchPass) -> None:
        """Take the gradients that a backward pass has left; those of a dummy count for nothing."""
        if self._alone:
            return
        gradients = [parameter.grad for parameter in self.own.values()]
        for parameter in self.own.values():
            parameter.grad = None
        if passing.micro_batch.real and any(gradient is not None for gradient in gradients):
            self.add(passing.micro_batch.index, gradients)

    def failed(self, error: BaseException) -> None:
        """Forget the gradients of the step."""
        self._forget()

    @torch.no_grad()
    def add(self, index: int, gradients: Sequence[Tensor | None]) -> None:
        """Add the gradients of one micro-batch; the tensors are kept."""
        if self._reproducible:
            self._partials.add(index, list(gradients))
            self._indices.append(index)
            return
        for position, gradient in enumerate(gradients):
            total = self._sums[position]
            if total is None:
                self._sums[position] = gradient
            elif gradient is not None:
                total.add_(gradient)

    @property
    def is_first(self) -> bool:
        """Return whether this rank is the first of those whose gradients are summed."""
        return self._ranks == 1 or dist.get_rank(self._group) == 0

    @torch.no_grad()
    def finish(self) -> None:
        """Write the step's sums to `.grad` of the placed weights; all ranks call it."""
        if self._alone:
            return
        totals = self._summed_by_tree() if self._reproducible else self._summed()
        for name, total in zip(self.own, totals, strict=True):
            placed = self.placed[name]
            if total is not None and isinstance(placed, DTensor):
                total = DTensor.from_local(
                    total, placed.device_mesh, placed.placements, run_check=False
                )
            placed.grad = total
        self._forget()

    def _summed(self) -> list[Tensor | None]:
        """Return the sums over all ranks; None for weights that no rank has used."""
        if self._ranks == 1:
            return self._sums
        flat = self._flat(self._sums)
        used = flat.new_tensor([value is not None for value in self._sums])
        flat = torch.cat([flat, used])
        dist.all_reduce(flat, group=self._group)
        return self._pieces(flat[: -len(used)].mul_(self.scale), flat[-len(used) :])

    def _summed_by_tree(self) -> list[Tensor | None]:
        """Return the sums of the tree, whichever rank has run which micro-batch."""
        if self._ranks == 1:
            totals = self._partials.total() or [None] * len(self.own)
        else:
            me = dist.get_rank(self._group)
            first = next(iter(self.own.values()))
            whose = torch.zeros(
                self._leaves + len(self.own), dtype=torch.int64, device=first.device
            )
            for index in self._indices:
                whose[index] = me + 1
            held = self._partials.held()
            whose[self._leaves :] = torch.tensor(
                [any(v[position] is not None for v in held) for position in range(len(self.own))]
            )
            dist.all_reduce(whose, group=self._group)
            # host waits for the device
            owners = [rank - 1 for rank in whose[: self._leaves].tolist()]
            nodes = nodes_of_owners(owners, self._ranks)
            mine = [self._partials.take(node) for node in nodes[me]]
            total = self._flat([None] * len(self.own))
            sums = [None if values is None else self._flat(values) for values in mine]
            group = self._group or dist.group.WORLD
            assert group is not None
            tree_all_reduce(sums, total, self._leaves, group, nodes)
            totals = self._pieces(total, whose[self._leaves :])
        clear_zero_signs([total for total in totals if total is not None])
        return totals

    def _flat(self, values: Sequence[Tensor | None]) -> Tensor:
        both = zip(self.own.values(), values, strict=True)
        return torch.cat(
            [(torch.zeros_like(p) if v is None else v).flatten().to(self._dtype) for p, v in both]
        )

    @property
    def _dtype(self) -> torch.dtype:
        kinds = {parameter.dtype for parameter in self.own.values()}
        return kinds.pop() if len(kinds) == 1 else torch.float64

    def _pieces(self, flat: Tensor, used: Tensor) -> list[Tensor | None]:
        pieces = torch.split(flat, [parameter.numel() for parameter in self.own.values()])
        return [
            piece.view_as(parameter).to(parameter.dtype) if was_used else None
            for piece, parameter, was_used in zip(
                pieces, self.own.values(), used.tolist(), strict=True
            )
        ]


def refuse_hidden(placed: ParallelModel, hidden: Sequence[nn.Parameter]) -> None:
    """Refuse parameters outside of model and optimizer that the loss depends on.

    The check comes after the first backward pass.
    """
    watched = [parameter for parameter in hidden if parameter.grad is None]

    def refuse_used() -> None:
        """Refuse the loss function if one of the watched parameters has a gradient now."""
        if used := [f"one of the shape {list(p.shape)}" for p in watched if p.grad is not None]:
            what = (
                "the loss function trains a parameter that it holds in a closure or an attribute:"
                f" {listed(used)}"
            )
            why = "neither the optimizer nor other ranks, nor checkpoints, know of it"
            fix = (
                "write the loss function as an nn.Module that owns it (self.scale ="
                " nn.Parameter(…)), and pass that"
            )
            raise UsageError(what, where="loss_fn", why=why, fix=fix)
        watched.clear()

    if watched:
        placed.finishers.insert(0, refuse_used)


def train_loss_weights(
    placed: ParallelModel, weights: LossWeights, *, alone: bool = False, scale: float = 1.0
) -> ParallelModel:
    """Let a placed model train, keep and count the weights of its loss function as its own.

    All ranks call it.

    With `alone` each rank trains a model of its own. `scale` undoes the factor of a strategy whose
    own reduction is a mean.
    """
    placed = replace(placed, loss=weights, buffers=placed.buffers | weights.buffers)
    if not weights.any:
        return placed
    weights.share(placed.layout, alone=alone, scale=scale)
    meshes = [p.device_mesh for p in placed.parameters.values() if isinstance(p, DTensor)]
    for name, parameter in weights.own.items():
        if meshes:  # an optimizer takes no mixture; the memory is the parameter's
            replicated = DTensor.from_local(
                parameter.detach(), meshes[0], [Replicate()] * meshes[0].ndim, run_check=False
            )
            weights.placed[name] = nn.Parameter(replicated, parameter.requires_grad)
    counted = placed.counted
    # of what ranks hold whole, one counts it
    if not all(dist.get_rank(group) == 0 for group in placed.norm_groups):
        counted = set(placed.parameters) if counted is None else counted
    elif counted is not None:
        counted = counted | set(weights.own)
    return replace(
        placed,
        finishers=[*placed.finishers, weights.finish],
        counted=counted,
        parameters=placed.parameters | weights.placed,
    )
