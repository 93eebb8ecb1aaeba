"""Runs micro-batches one at a time, for all strategies but pipelines.

    steps before, in order → forward → loss added → backward → the same steps after, in reverse order

What wraps a micro-batch is a list of `AroundMicroBatch` (see `lockstep.parallel.placement.around_micro_batches`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.data.batches import MicroBatch
from lockstep.heartbeat import went_forward
from lockstep.models.protocol import Objective
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.precision import Precision
from lockstep.randomness import RandomState

ForwardBackward = Callable[[Sequence[MicroBatch], LossAccumulator, float], None]
"""(this rank's micro-batches of a step, the step's accumulator, factor).

Adds `factor` × the gradient of the summed loss of the *whole* step to `.grad` of the placed parameters, reduced over
all ranks once `finish_gradients` has run.
"""

# (micro-batch, accumulator, factor, last): runs forward and backward; `last` reduces the gradients over ranks.
MicroStep = Callable[[MicroBatch, LossAccumulator, float, bool], Loss]
Evaluate = Callable[[Sequence[MicroBatch], LossAccumulator], None]  # runs forward passes only
Explain = Callable[[BaseException], Exception | None]  # → a clearer error for one of torch's; None: it knows none


@dataclass
class MicroBatchPass:
    """One forward and backward pass."""

    micro_batch: MicroBatch  # what it runs
    micro_batches_per_step: int  # their number over all ranks
    factor: float  # what the summed loss is multiplied by before backward
    last: bool  # whether it is this rank's last of the step, whose gradients are reduced over ranks
    # Tensors that the backward pass begins at beside the loss, with gradients of zero, for the messages inside of it.
    further_roots: list[Tensor] = field(default_factory=list)


class AroundMicroBatch:
    """A step before and after each micro-batch; subclasses override what they need."""

    def before(self, run: MicroBatchPass) -> None:
        """Prepare for the forward pass."""

    def after_forward(self, run: MicroBatchPass) -> None:
        """Act between the forward and the backward pass."""

    def after(self, run: MicroBatchPass) -> None:
        """Act on the gradients, once the backward pass is over."""

    def failed(self, error: BaseException) -> Exception | None:
        """Clean up after a pass that raised; return a clearer error to raise in its place, if there is one."""
        return None


def micro_step_of(
    model: nn.Module, objective: Objective, random_state: RandomState, precision: Precision,
    around: Sequence[AroundMicroBatch], *, multiplier: float = 1.0,
) -> MicroStep:  # fmt: skip
    """Return the `MicroStep` of a model that is whole on this rank, or gathers itself; `around`: outermost first."""
    inward, outward = list(around), list(reversed(around))

    def micro_step(micro_batch: MicroBatch, accumulator: LossAccumulator, factor: float, last: bool) -> Loss:
        run = MicroBatchPass(micro_batch, accumulator.micro_batches_per_step, factor, last)
        for step in inward:
            step.before(run)
        try:
            random_state.at(micro_batch.index)
            loss = forward_loss(model, objective, precision, micro_batch)
            for step in outward:
                step.after_forward(run)
            accumulator.add(micro_batch, loss)
            if last:
                accumulator.start_reduce()
            # A dummy has weight zero: its backward pass is there for the collectives inside of it.
            weight = factor * multiplier * loss.times if micro_batch.real else 0.0
            gradient = torch.full_like(loss.value, weight)
            if run.further_roots:
                zeros = [torch.zeros_like(root) for root in run.further_roots]
                torch.autograd.backward([loss.value, *run.further_roots], [gradient, *zeros])
            else:
                loss.value.backward(gradient)  # type: ignore[no-untyped-call]
            random_state.backward_done()
        except BaseException as error:
            explanations = [step.failed(error) for step in outward]
            explained = next((found for found in explanations if found is not None), None)
            if explained is None:
                raise
            raise explained from error
        for step in outward:
            step.after(run)
        return loss

    return micro_step


def forward_loss(model: nn.Module, objective: Objective, precision: Precision, micro_batch: MicroBatch) -> Loss:
    """Return the loss of one micro-batch."""
    with precision.autocast():
        return Loss(*objective.of(model, micro_batch.batch))


def in_order(micro_step: MicroStep) -> ForwardBackward:
    """Return a function that runs the micro-batches of a step one after the other."""

    def forward_backward(micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator, factor: float) -> None:
        for place, micro_batch in enumerate(micro_batches, start=1):
            micro_step(micro_batch, accumulator, factor, place == len(micro_batches))
            went_forward()

    return forward_backward


def evaluation_of(model: nn.Module, objective: Objective, random_state: RandomState, precision: Precision) -> Evaluate:
    """Return forward passes only, under `no_grad`; the caller has put the model into evaluation mode."""

    @torch.no_grad()
    def evaluate(micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator) -> None:
        for micro_batch in micro_batches:
            random_state.at(micro_batch.index)
            accumulator.add(micro_batch, forward_loss(model, objective, precision, micro_batch))
            went_forward()

    return evaluate


def plain_forward(model: nn.Module, precision: Precision) -> Callable[..., Any]:
    """Return the model's forward pass for use outside of the step (sampling from it)."""

    @torch.no_grad()
    def forward(*args: Any, **kwargs: Any) -> Any:
        with precision.autocast():
            return model(*args, **kwargs)

    return forward


@contextmanager
def explained(explanations: Sequence[Explain]) -> Iterator[None]:
    """Raise the first explanation that there is of an error inside of the block."""
    try:
        yield
    except RuntimeError as error:
        clearer = next((found for explain in explanations if (found := explain(error)) is not None), None)
        if clearer is None:
            raise
        raise clearer from error
