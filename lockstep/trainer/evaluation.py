"""Evaluation: every sample once, the mean over valid targets, the same number on every rank and every topology."""

from collections.abc import Callable
from typing import Any

import torch

from lockstep.data import StepSource
from lockstep.parallel import Placed, Share
from lockstep.parallel.numbers import Number, at_least

WINDOW = 16  # micro-batches whose losses travel in one all-reduce; fixed, so that the order of the sum is


def evaluate(placed: Placed, source: StepSource) -> float:
    """The mean loss over all of the source.

    Args:
        source: one epoch, in windows of `WINDOW` micro-batches, shared out by `placed.assign`.
    """
    loss_sum: Number = 0.0
    count: Number = 0.0
    before = [(part, part.training) for part in placed.parts]
    for part in placed.parts:
        part.eval()
    try:
        for batches in source:
            ledger = placed.ledger(batches.num_micro_batches)
            with placed.cursor.running("eval", batches.step):
                placed.evaluate([Share(m.index, m.batch, m.real) for m in batches.mine], ledger)
            some_loss, some_count = ledger.totals()
            loss_sum, count = loss_sum + some_loss, count + some_count
    finally:
        source.close()
        for part, training in before:
            part.train(training)
    return float(loss_sum / at_least(count, 1.0))


def sample_from(placed: Placed) -> Callable[[torch.Tensor], Any]:
    """The placed model as a function of its inputs, in evaluation mode; all ranks call it together."""

    def forward(*inputs: torch.Tensor) -> Any:
        for part in placed.parts:
            part.eval()
        with placed.cursor.running("sample", 0):
            placed.cursor.at(0)
            return placed.forward(*inputs)

    return forward
