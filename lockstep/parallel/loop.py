"""The loop over micro-batches that single, dp, ddp, fsdp and accelerate share; they differ in when it synchronises."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.data.batches import MicroBatch
from lockstep.models.protocol import Objective
from lockstep.parallel.buffers import RunningBuffers
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.parallel.parallel_model import Evaluate, ForwardBackward, MicroStep
from lockstep.precision import Precision
from lockstep.randomness import RandomState


def forward_loss(model: nn.Module, objective: Objective, precision: Precision, micro_batch: MicroBatch) -> Loss:
    """Of one micro-batch."""
    with precision.autocast():
        return Loss(*objective.of(model, micro_batch.batch))


def looped(
    model: nn.Module, objective: Objective, random_state: RandomState, precision: Precision, buffers: RunningBuffers, *,
    set_sync: Callable[[bool], None] = lambda _last: None, multiplier: float = 1.0,
    after_backward: Callable[[MicroBatch], None] = lambda _micro_batch: None,
) -> MicroStep:  # fmt: skip
    """A `MicroStep` for a model that is whole on this rank, or gathers itself.

    Args:
        buffers: keeps running statistics the same on any number of ranks.
        set_sync: told before each forward pass whether it is the rank's last in this step.
        multiplier: undoes a mean that the strategy's own reduction takes (DDP: the number of ranks).
        after_backward: told after each backward pass.
    """

    def micro_step(micro_batch: MicroBatch, accumulator: LossAccumulator, factor: float, last: bool) -> Loss:
        set_sync(last)
        random_state.at(micro_batch.index)
        with buffers.micro_batch(micro_batch.index, real=micro_batch.real):
            loss = forward_loss(model, objective, precision, micro_batch)
            buffers.forward_done()
            accumulator.add(micro_batch, loss)
            if last:
                accumulator.start_reduce()
            # A dummy has weight zero: its backward pass is there for the collectives inside of it.
            weight = factor * multiplier * loss.times if micro_batch.real else 0.0
            loss.value.backward(torch.full_like(loss.value, weight))  # type: ignore[no-untyped-call]
            after_backward(micro_batch)
        if last:
            buffers.finish_step(accumulator.micro_batches_per_step)
        return loss

    return micro_step


def in_order(micro_step: MicroStep) -> ForwardBackward:
    """The shares of a step, one after the other."""

    def forward_backward(micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator, factor: float) -> None:
        for place, micro_batch in enumerate(micro_batches, start=1):
            micro_step(micro_batch, accumulator, factor, place == len(micro_batches))

    return forward_backward


def evaluated(model: nn.Module, objective: Objective, random_state: RandomState, precision: Precision) -> Evaluate:
    """Forward only, under `no_grad`; the caller has put the parts into evaluation mode."""

    @torch.no_grad()
    def evaluate(micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator) -> None:
        for micro_batch in micro_batches:
            random_state.at(micro_batch.index)
            accumulator.add(micro_batch, forward_loss(model, objective, precision, micro_batch))

    return evaluate


def plain_forward(model: nn.Module, precision: Precision) -> Callable[..., Any]:
    """The model's forward pass for use outside of the step (sampling from it)."""

    @torch.no_grad()
    def forward(*args: Any, **kwargs: Any) -> Any:
        with precision.autocast():
            return model(*args, **kwargs)

    return forward
