"""Losses and counts of a step: the same numbers, however a loss is reduced and wherever it is written down."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.models.protocol import objective_of
from lockstep.parallel import ledger as ledgers
from lockstep.parallel.ledger import HostLedger, Ledger, Loss, Share
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def totals(ledger: Ledger, losses: list[Loss]) -> tuple[float, float]:
    for index, loss in enumerate(losses):
        ledger.enter(Share(index, None), loss)
    loss_sum, count = ledger.totals()
    return float(loss_sum), float(count)


@pytest.mark.parametrize("times", [1, 3, 7, 1000, 2**20])
def test_the_host_rounds_as_the_device_does(times: int) -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(times)).exp()
    losses = [Loss(value, times, times) for value in values]
    assert totals(HostLedger(50, shared=False), losses) == totals(Ledger(50, CPU, shared=False), losses)
    assert totals(HostLedger(50, shared=False), losses)[0] == sum((value * times).item() for value in values)


def test_few_ranks_and_many_come_to_the_same_sums() -> None:
    """By an exchange with each other rank, and by an all-reduce."""
    found = run_ranks(sums_of_ranks, 3)
    assert found[0] == found[1] == found[2]
    at_once, around_the_ring = found[0]
    assert at_once == around_the_ring
    losses = [math.pi * (rank + 1) * 10 ** (3 * rank) for rank in range(3)]
    assert at_once == ((sum(torch.tensor(losses).tolist()), 6), 2, 21)


def sums_of_ranks() -> list[object]:
    rank, found = dist.get_rank(), []
    for ledgers.AT_ONCE in (3, 2):
        ledger = HostLedger(3, shared=True)
        ledger.stamp(7)
        if rank:
            ledger.vote_to_stop()
        ledger.enter(Share(rank, None), Loss(torch.tensor(math.pi * (rank + 1) * 10 ** (3 * rank)), 1, rank + 1))
        ledger.close()
        found.append((ledger.totals(), ledger.stop_votes, ledger.stamps))
        assert ledger.totals() == found[-1][0]
    return found


@pytest.mark.parametrize("value", [3e38, math.inf, math.nan])
def test_what_overflows_is_seen(value: float) -> None:
    losses = [Loss(torch.tensor(value), 8, 8)]
    for ledger in (HostLedger(1, shared=False), Ledger(1, CPU, shared=False)):
        assert not math.isfinite(totals(ledger, losses)[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_factors_multiply_to_the_sum(reduction: str) -> None:
    model = nn.Linear(3, 3)
    objective = objective_of(model, nn.MSELoss(reduction=reduction) if reduction != "none" else per_sample)
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
