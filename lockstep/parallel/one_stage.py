"""Forward passes alone of a model that a rank runs from batch to loss: evaluation, and samples.

Tests: tests/parallel/test_executor.py, tests/parity/test_data_parallel.py
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.data.batches import MicroBatch
from lockstep.heartbeat.writer import went_forward
from lockstep.models.protocol import Objective
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.parallel.passes import Evaluate
from lockstep.precision import Precision
from lockstep.randomness import RandomState


def evaluation_of(
    model: nn.Module, objective: Objective, random_state: RandomState, precision: Precision
) -> Evaluate:
    """Return forward passes only, under `no_grad`.

    The caller has put the model into evaluation mode.
    """

    @torch.no_grad()
    def evaluate(micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator) -> None:
        for micro_batch in micro_batches:
            random_state.at(micro_batch.index)
            with precision.autocast():
                loss = Loss(*objective.of(model, micro_batch.batch))
            accumulator.add(micro_batch, loss)
            went_forward()

    return evaluate


def plain_forward(model: nn.Module, precision: Precision) -> Callable[..., Any]:
    """Return the model's forward pass for use outside of the step (sampling from it)."""

    @torch.no_grad()
    def forward(*args: Any, **kwargs: Any) -> Any:
        with precision.autocast():
            return model(*args, **kwargs)

    return forward
