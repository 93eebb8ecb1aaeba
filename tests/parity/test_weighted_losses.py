"""Losses that weigh samples: the mean over the weights of the global batch, however it is cut."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep import Trainer
from lockstep.errors import RunError, UsageError
from tests.ranks import run_ranks

SAMPLES = 48
BATCH = 16
STEPS = 3
RATE = 0.5
SCALES = (1.0, 1e-4)  # sums of weights above and below 1


class Weighted(Dataset[dict[str, Tensor]]):
    """Samples with weights from 0 to 4 times a scale; some have none."""

    deterministic = True

    def __init__(self, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(SAMPLES, 6, generator=generator)
        self.targets = torch.randint(4, (SAMPLES,), generator=generator)
        self.weights = torch.arange(SAMPLES).remainder(5) * scale

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        columns = {"input": self.x, "targets": self.targets, "weights": self.weights}
        return {key: column[index] for key, column in columns.items()}


def weighted(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return (losses * weights).sum() / weights.sum()


def counted() -> Callable[..., Tensor]:
    """The same, with what it is a mean over."""

    def loss(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        return weighted(outputs, targets, weights)

    loss.count = lambda batch: batch["weights"].sum()  # type: ignore[attr-defined]
    return loss


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def by_hand(scale: float) -> tuple[list[float], Tensor]:
    """Losses and last parameters of plain PyTorch, with the global batch at once."""
    data = Weighted(scale)
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=RATE)
    losses = []
    for step in range(STEPS):
        part = slice(step * BATCH, (step + 1) * BATCH)
        loss = weighted(plain(data.x[part]), data.targets[part], data.weights[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, flat(plain.state_dict())


def flat(state: Mapping[str, Tensor]) -> Tensor:
    """All values in one; of ranks, the first alone has some."""
    return torch.cat([torch.empty(0), *(state[name].flatten() for name in sorted(state))])


def train(strategy: str, batch_size: int, scale: float) -> tuple[list[float], Tensor]:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    settings: dict[str, Any] = {"strategy": strategy, "batch_size": batch_size}
    trainer = Trainer(
        net,
        optimizer,
        counted(),
        **settings,
        global_batch_size=BATCH,
        max_steps=STEPS,
        shuffle=False,
    )
    losses = [float(record.loss) for record in trainer.steps(Weighted(scale))]
    return losses, flat(trainer.state_dict())


Cases = dict[tuple[str, int, float], tuple[list[float], Tensor]]


def cases(strategies: list[str], sizes: Sequence[int]) -> Cases:
    grid = [(name, size, scale) for name in strategies for size in sizes for scale in SCALES]
    return {case: train(*case) for case in grid}


def require_equal(found: Cases) -> None:
    for case, (losses, values) in found.items():
        expected_losses, expected = by_hand(case[2])
        assert losses == pytest.approx(expected_losses, rel=1e-6), case
        if len(values):
            assert (values - expected).norm() <= 1e-6 * expected.norm(), case


def test_one_process_takes_the_step_of_the_whole_batch_however_it_is_cut() -> None:
    require_equal(cases(["single"], (1, 16)))


def test_two_ranks_do_too() -> None:
    for found in run_ranks(cases, 2, ["ddp"], [4]):
        require_equal(found)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "more"), [(2, ["pipeline"]), (3, [])])
def test_other_strategies_do_too(ranks: int, more: list[str]) -> None:
    strategies = ["ddp", "fsdp", *more]
    for found in run_ranks(cases, ranks, strategies, [1, 4, 16], timeout=600):
        require_equal(found)


def steps(loss_fn: Any, data: Any, max_steps: int = 1) -> list[float]:
    sizes: dict[str, Any] = {"batch_size": 4, "global_batch_size": BATCH, "max_steps": max_steps}
    trainer = Trainer(model(), "sgd", loss_fn, shuffle=False, **sizes)
    return [float(record.loss) for record in trainer.steps(data)]


def test_without_a_count_the_line_to_write_is_told() -> None:
    with pytest.warns(UserWarning, match=r'weighted\.count = lambda batch: batch\["weights"\]'):
        steps(weighted, Weighted())


@pytest.mark.parametrize("weight", [-1.0, float("nan")])
def test_weights_that_are_no_weights_are_one_error(weight: float) -> None:
    data = Weighted()
    data.weights[:] = weight
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            RunError, match=r"the sum of their weights, is (-4|nan)(.|\n)*micro-bat"
        ):
            steps(counted(), data)


def test_micro_batches_without_weight_count_for_nothing_and_a_step_of_them_is_skipped() -> None:
    data = Weighted()
    data.weights[:BATCH] = 0
    data.weights[BATCH + 4 : BATCH + 8] = 0
    first, second = steps(counted(), data, max_steps=1 + 1)
    assert math.isnan(first)
    part = slice(BATCH, 2 * BATCH)
    expected = weighted(model()(data.x[part]), data.targets[part], data.weights[part])
    assert second == pytest.approx(expected.item(), rel=1e-6)


def test_what_a_loss_needs_and_a_batch_has_not_is_one_error() -> None:
    class Pairs(Weighted):
        def __getitem__(self, index: int) -> Any:
            return self.x[index], self.targets[index]

    says = r"loss function weighted takes weights, and a batch has no names: it is a (list|tuple)"
    with pytest.raises(UsageError, match=says):
        steps(weighted, Pairs())
