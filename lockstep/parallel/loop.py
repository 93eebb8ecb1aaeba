"""The loop over micro-batches that single, dp, ddp, fsdp and accelerate share; they differ in when it synchronises."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.models.protocol import Objective
from lockstep.parallel.buffers import RunningBuffers
from lockstep.parallel.ledger import Ledger, Loss, Share
from lockstep.parallel.placed import Evaluate, ForwardBackward, MicroStep
from lockstep.precision import Precision
from lockstep.randomness import Cursor


def forward_loss(model: nn.Module, objective: Objective, precision: Precision, share: Share) -> Loss:
    """Of one micro-batch."""
    with precision.autocast():
        return Loss(*objective.of(model, share.batch))


def looped(
    model: nn.Module, objective: Objective, cursor: Cursor, precision: Precision, buffers: RunningBuffers, *,
    set_sync: Callable[[bool], None] = lambda _last: None, multiplier: float = 1.0,
    after_backward: Callable[[Share], None] = lambda _share: None,
) -> MicroStep:  # fmt: skip
    """A `MicroStep` for a model that is whole on this rank, or gathers itself.

    Args:
        buffers: keeps running statistics the same on any number of ranks.
        set_sync: told before each forward pass whether it is the rank's last in this step.
        multiplier: undoes a mean that the strategy's own reduction takes (DDP: the number of ranks).
        after_backward: told after each backward pass.
    """

    def micro_step(share: Share, ledger: Ledger, factor: float, last: bool) -> Loss:
        set_sync(last)
        cursor.at(share.index)
        with buffers.micro_batch(share.index, real=share.real):
            loss = forward_loss(model, objective, precision, share)
            buffers.forward_done()
            ledger.enter(share, loss)
            if last:
                ledger.close()
            # A dummy has weight zero: its backward pass is there for the collectives inside of it.
            weight = factor * multiplier * loss.times if share.real else 0.0
            loss.value.backward(torch.full_like(loss.value, weight))  # type: ignore[no-untyped-call]
            after_backward(share)
        if last:
            buffers.finish_step(ledger.slots)
        return loss

    return micro_step


def in_order(micro_step: MicroStep) -> ForwardBackward:
    """The shares of a step, one after the other."""

    def forward_backward(shares: Sequence[Share], ledger: Ledger, factor: float) -> None:
        for place, share in enumerate(shares, start=1):
            micro_step(share, ledger, factor, place == len(shares))

    return forward_backward


def evaluated(model: nn.Module, objective: Objective, cursor: Cursor, precision: Precision) -> Evaluate:
    """Forward only, under `no_grad`; the caller has put the parts into evaluation mode."""

    @torch.no_grad()
    def evaluate(shares: Sequence[Share], ledger: Ledger) -> None:
        for share in shares:
            cursor.at(share.index)
            ledger.enter(share, forward_loss(model, objective, precision, share))

    return evaluate


def plain_forward(model: nn.Module, precision: Precision) -> Callable[..., Any]:
    """The model's forward pass for use outside of the step (sampling from it)."""

    @torch.no_grad()
    def forward(*args: Any, **kwargs: Any) -> Any:
        with precision.autocast():
            return model(*args, **kwargs)

    return forward
