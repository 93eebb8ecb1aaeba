"""Forward passes alone of a model that a rank runs from batch to loss: evaluation, and samples.

Tests: tests/parallel/execution/test_executor.py, tests/parity/test_data_parallel.py
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.data.batches import MicroBatch
from lockstep.heartbeat.writer import went_forward
from lockstep.models.objective import Objective
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.precision import Precision
from lockstep.randomness import RandomState


@dataclass(frozen=True)
class ForwardPasses:
    """Forward passes of a model outside of training steps, without gradients."""

    model: nn.Module
    objective: Objective
    random_state: RandomState
    precision: Precision

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch], accumulator: LossAccumulator) -> None:
        """Run forward passes (`Evaluate`); the caller has put the model into evaluation mode."""
        for micro_batch in micro_batches:
            self.random_state.at(micro_batch.index)
            with self.precision.autocast():
                loss = Loss(*self.objective.of(self.model, micro_batch.batch))
            accumulator.add(micro_batch, loss)
            went_forward()

    @torch.no_grad()
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's outputs, for use outside of the step (sampling from it)."""
        with self.precision.autocast():
            return self.model(*args, **kwargs)
