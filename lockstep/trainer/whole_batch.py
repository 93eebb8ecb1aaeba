"""Trains with a loss over all samples of a step together (`WholeBatch`).

The losses of CLIP and SimCLR are examples.

A sample's loss depends on all others of the global batch. So a step runs its micro-batches twice:
forward passes without a graph give rank 0 all outputs, for the loss and its gradient with respect
to each; then forward and backward passes start from that gradient. The random numbers of a
micro-batch follow from its number, so both compute the same. Source: Gao et al. 2021, "Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup" (arXiv:2101.06983).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint import Ranks
from lockstep.data import MicroBatch, batch_length, move
from lockstep.errors import UsageError
from lockstep.models.batch_parts import targets_of
from lockstep.parallel.loss_accumulator import LossAccumulator
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.torch_compat.pytree import tree_flatten, tree_unflatten
from lockstep.trainer.evaluation import micro_batch_of, on_cpu, restored_buffers

_FAILED = "the loss over the whole batch could not be computed"


@dataclass(frozen=True)
class WholeBatch:
    """Declares that a loss is over all samples of a step together.

    It is used as in `Trainer(model, optimizer, WholeBatch(clip_loss))`.

    An evaluation computes it over each of its own micro-batches (`training.eval_batch_size`).

    Args:
        loss_fn: (outputs, targets) of the whole global batch, in the order of the samples → their
            mean loss. Outputs that are one number, such as a temperature, must be the same for all
            micro-batches. If the data have no targets, it gets None.
    """

    loss_fn: Callable[[Any, Any], Tensor]

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """Return the loss over these samples."""
        return self.loss_fn(outputs, targets)


def with_whole_batch_loss(placed: ParallelModel, loss: WholeBatch) -> ParallelModel:
    """Return the placed model with steps whose loss is over all of their samples."""
    steps = WholeBatchSteps(placed, loss)
    return replace(placed, passes=steps.forward_backward, run_micro_batch=None)


class WholeBatchSteps:
    """Runs the micro-batches of a step for a `WholeBatch` loss.

    It takes the place of `placed.passes`.
    """

    def __init__(self, placed: ParallelModel, loss: WholeBatch) -> None:
        if placed.local_training is not None or placed.layout.cuts_sequences:
            on = (
                "on context ranks"
                if placed.local_training is None
                else "where workers train their own models"
            )
            what = f"a loss over the whole batch is not supported {on}"
            raise UsageError(what, where="WholeBatch", fix="use ddp, fsdp, pipeline or tensor")
        self._placed = placed
        self._loss = loss
        self._run = placed.passes

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator, factor: float
    ) -> None:
        """Run a step (`lockstep.parallel.execution.passes.ForwardBackward`)."""
        tap = self._placed.objective.tap
        kept: dict[int, tuple[Any, Any]] = {}

        def collect(outputs: Any, batch: Any) -> tuple[Tensor, int, int]:
            micro_batch = micro_batch_of(batch, micro_batches)
            if micro_batch.real and self._placed.adds_losses:
                kept[micro_batch.index] = on_cpu((outputs, targets_of(batch, default=None)))
            return torch.zeros((), device=self._placed.random_state.device), 1, 1

        with tap.opened(collect), restored_buffers(self._placed):
            self._placed.evaluate(
                micro_batches, self._placed.loss_accumulator(accumulator.micro_batches_per_step)
            )
        mine = [micro_batch.index for micro_batch in micro_batches if micro_batch.real]
        loss, samples, gradients, of_loss = Ranks().exchange(
            _FAILED, lambda: (kept, mine), self._gradients
        )
        self._train_loss(of_loss, factor * samples, accumulator.micro_batches_per_step)

        def surrogate(outputs: Any, batch: Any) -> tuple[Tensor, int, int]:
            """Return a number with the loss's gradient and this micro-batch's share of it."""
            micro_batch = micro_batch_of(batch, micro_batches)
            count = batch_length(batch)
            leaves = [leaf for leaf in tree_flatten(outputs)[0] if _is_float(leaf)]
            each = (
                gradients[micro_batch.index]
                if micro_batch.real
                else [torch.zeros(())] * len(leaves)
            )
            products = [
                (leaf.float() * g.to(leaf.device)).sum()
                for leaf, g in zip(leaves, each, strict=True)
            ]
            total = torch.stack(products).sum() * samples
            return total - total.detach() + loss * count, 1, count

        with tap.opened(surrogate):
            self._run(micro_batches, accumulator, factor)

    def _gradients(
        self, by_rank: list[tuple[dict[int, tuple[Any, Any]], list[int]]]
    ) -> list[tuple[float, int, dict[int, list[Tensor]], dict[str, Tensor]]]:
        """Return loss, number of samples, gradients of outputs and of the loss, for each rank.

        The gradients of outputs are those of the rank's micro-batches. Those of the loss are the
        gradients of the weights of the loss function, by name, and its buffers as they are now.

        A rank brings outputs and targets by micro-batch, and the micro-batches that it runs: those
        that share layers run the same ones.
        """
        device = self._placed.random_state.device
        rows = sorted(
            chain.from_iterable(kept.items() for kept, _ in by_rank), key=lambda row: row[0]
        )
        flat = [tree_flatten(outputs) for _, (outputs, _) in rows]
        leaves = [[_leaf(value, device) for value in values] for values, _ in flat]
        outputs = tree_unflatten(
            [_joined(column) for column in zip(*leaves, strict=True)], flat[0][1]
        )
        targets_flat = [tree_flatten(move(targets, device)) for _, (_, targets) in rows]
        columns = zip(*(values for values, _ in targets_flat), strict=True)
        targets = tree_unflatten([_joined(column) for column in columns], targets_flat[0][1])
        with torch.enable_grad():
            loss = self._loss(outputs, targets)
        wanted = [[leaf for leaf in row if _is_float(leaf)] for row in leaves]
        weights = self._placed.loss
        own = {} if weights is None else weights.own
        asked = [*chain.from_iterable(wanted), *own.values()]
        gradients = iter(torch.autograd.grad(loss, asked, allow_unused=True))
        each = {}
        for (index, _), row in zip(rows, wanted, strict=True):
            each[index] = [
                (torch.zeros_like(leaf) if (g := next(gradients)) is None else g).cpu()
                for leaf in row
            ]
        samples = sum(
            next(leaf.shape[0] for leaf in row if isinstance(leaf, Tensor) and leaf.ndim)
            for row in leaves
        )
        value = float(loss.detach())  # host waits for the device
        of_loss = {name: g.cpu() for name in own if (g := next(gradients)) is not None}
        of_loss |= (
            {}
            if weights is None
            else {name: buffer.cpu() for name, buffer in weights.buffers.items()}
        )
        return [
            (value, samples, {index: each[index] for index in indices}, of_loss)
            for _, indices in by_rank
        ]

    @torch.no_grad()
    def _train_loss(
        self, of_loss: dict[str, Tensor], factor: float, micro_batches_per_step: int
    ) -> None:
        """Add gradients of the loss function's weights, times `factor`, and copy its buffers."""
        weights = self._placed.loss
        if weights is None:
            return
        for name, buffer in weights.buffers.items():
            buffer.copy_(of_loss[name])
        if weights.any and weights.is_first:
            weights.begin(micro_batches_per_step)
            device = self._placed.random_state.device
            scale = factor / weights.scale
            weights.add(
                0, [of_loss[n].to(device) * scale if n in of_loss else None for n in weights.own]
            )


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def _leaf(value: Any, device: torch.device) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.to(device)
    return value.float().requires_grad_() if value.is_floating_point() else value


def _joined(column: Sequence[Any]) -> Any:
    """Return the values of all micro-batches as one: tensors concatenated, others taken once."""
    if not all(isinstance(value, Tensor) for value in column):
        return column[0]
    with torch.enable_grad():
        return torch.cat(list(column)) if column[0].ndim else torch.stack(list(column)).mean()
