"""A scheduler of torch's drives the learning rate, as by hand; over a resumption too."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as of_torch

from lockstep import Trainer
from lockstep.errors import UsageError
from tests.trainer.test_trainer import linear, regression

SCHEDULERS: dict[str, Any] = {
    "step": lambda o: of_torch.StepLR(o, 3, gamma=0.5),
    "lambda": lambda o: of_torch.LambdaLR(o, lambda update: (update + 1) / 4),
    "cosine": lambda o: of_torch.CosineAnnealingLR(o, 8),
    "one cycle, momentum too": lambda o: of_torch.OneCycleLR(o, 0.1, total_steps=8),
    "in sequence": lambda o: of_torch.SequentialLR(
        o, [of_torch.LinearLR(o, 0.1, total_iters=3), of_torch.ExponentialLR(o, 0.8)], [3]
    ),
    "chained": lambda o: of_torch.ChainedScheduler(
        [of_torch.ConstantLR(o, 0.5, 2), of_torch.ExponentialLR(o, 0.9)]
    ),
}


def trainer_of(make: Any, **settings: Any) -> Trainer:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    settings = {"batch_size": 5, "max_steps": 8, "shuffle": False, **settings}
    return Trainer(model, optimizer, nn.MSELoss(), scheduler=make(optimizer), **settings)


def by_hand(make: Any) -> list[tuple[float, float]]:
    """(learning rate, momentum) of each update."""
    optimizer = torch.optim.SGD(linear().parameters(), lr=0.05, momentum=0.9)
    scheduler = make(optimizer)
    found = []
    for _ in range(8):
        (group,) = optimizer.param_groups
        found.append((group["lr"], group["momentum"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("name", SCHEDULERS)
def test_rates_are_those_of_the_scheduler_also_after_a_resumption(
    name: str, tmp_path: Path
) -> None:
    make = SCHEDULERS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = by_hand(make)
    first = trainer_of(make)
    seen = []
    for record in first.steps(regression()):
        seen.append((record.lr, first.optimizer.param_groups[0]["momentum"]))
        if record.step == 5:
            saved = first.save_checkpoint(tmp_path)
    assert [list(pair) for pair in seen] == [pytest.approx(list(pair)) for pair in expected]
    again = trainer_of(make)
    again.load_checkpoint(saved)
    assert [r.lr for r in again.steps(regression())] == pytest.approx(
        [rate for rate, _ in expected[5:]]
    )
    for mine, theirs in zip(
        again.placed.parameters.values(), first.placed.parameters.values(), strict=True
    ):
        assert torch.equal(mine, theirs)
    first.load_checkpoint(saved)  # backwards
    assert next(first.steps(regression())).lr == pytest.approx(expected[5][0])


def test_a_function_makes_one_over_the_trainers_own_optimizer() -> None:
    trainer = Trainer(
        linear(),
        loss_fn=nn.MSELoss(),
        learning_rate=0.1,
        batch_size=5,
        max_steps=3,
        scheduler=lambda o: of_torch.ExponentialLR(o, 0.5),
    )
    assert [r.lr for r in trainer.steps(regression())] == pytest.approx([0.1, 0.05, 0.025])


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (SCHEDULERS["step"], {"lr_schedule": "linear"}, "StepLR or training.lr_schedule, not both"),
        (
            lambda _: SCHEDULERS["step"](torch.optim.SGD(linear().parameters())),
            {},
            "over another optimizer",
        ),
    ],
)
def test_mistakes_are_told(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trainer_of(make, **settings)
