"""Losses and counts of a step: the same numbers, however a loss is reduced and wherever it is
written down.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from lockstep.data.batches import MicroBatch
from lockstep.models.protocol import objective_of
from lockstep.parallel.loss_accumulator import HostLossAccumulator, Loss, LossAccumulator

CPU = torch.device("cpu")


def totals(accumulator: LossAccumulator, losses: list[Loss]) -> tuple[float, float]:
    for index, loss in enumerate(losses):
        accumulator.add(MicroBatch(index, None), loss)
    loss_sum, count = accumulator.totals()
    return float(loss_sum), float(count)


@pytest.mark.parametrize("times", [1, 3, 7, 1000, 2**20])
def test_the_host_rounds_as_the_device_does(times: int) -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(times)).exp()
    losses = [Loss(value, times, times) for value in values]
    assert totals(HostLossAccumulator(50, shared=False), losses) == totals(
        LossAccumulator(50, CPU, shared=False), losses
    )
    assert totals(HostLossAccumulator(50, shared=False), losses)[0] == sum(
        (value * times).item() for value in values
    )


@pytest.mark.parametrize("value", [3e38, math.inf, math.nan])
def test_what_overflows_is_seen(value: float) -> None:
    losses = [Loss(torch.tensor(value), 8, 8)]
    for accumulator in (
        HostLossAccumulator(1, shared=False),
        LossAccumulator(1, CPU, shared=False),
    ):
        assert not math.isfinite(totals(accumulator, losses)[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_factors_multiply_to_the_sum(reduction: str) -> None:
    model = nn.Linear(3, 3)
    objective = objective_of(
        model, nn.MSELoss(reduction=reduction) if reduction != "none" else per_sample
    )
    batch = (torch.randn(4, 3), torch.randn(4, 3))
    outputs = model(batch[0])
    loss, times, count = objective.factors(outputs, batch)
    assert times == (4 if reduction == "mean" else 1)
    assert count == 4
    assert torch.equal(objective.summed(outputs, batch), loss * times)


def per_sample(outputs: Tensor, targets: Tensor) -> Tensor:
    """[B, N] and [B, N] → [B]."""
    return (outputs - targets).square().mean(dim=1)


per_sample.reduction = "none"  # type: ignore[attr-defined]


def test_a_batch_without_a_valid_target_adds_nothing() -> None:
    """Its mean is 0/0, and the gradient of that must not be reached."""
    model = nn.Linear(3, 5)
    objective = objective_of(model, nn.CrossEntropyLoss())
    batch = (torch.randn(2, 3), torch.full((2,), -100))
    loss, times, count = objective.factors(model(batch[0]), batch)
    assert (loss.item(), times, int(count)) == (0.0, 1, 0)
