"""What consumes a step: the same list, in the same order, in every way to train."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Trainer
from lockstep.trainer.after_step import StepConsumers

STEPS = 2
AT_ONCE = [
    "keep_position",
    "require_lock",
    "keep_metrics",
    "record",
    "say_placement_lines",
    "tell_anomaly",
    "save_before_stop",
]


def points() -> TensorDataset:
    x = torch.randn(8 * STEPS, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :1])


@pytest.fixture
def consumed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The consumers that were called, in order; each does its work, too."""
    called: list[str] = []

    def noted(name: str, consume: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            called.append(name)
            consume(*arguments)

        return call

    for name in (*AT_ONCE, "evaluate_if_due", "save_if_due"):
        monkeypatch.setattr(StepConsumers, name, noted(name, getattr(StepConsumers, name)))
    return called


def by_train(trainer: Trainer, _called: list[str]) -> None:
    trainer.train(points(), points())


def by_steps(trainer: Trainer, called: list[str]) -> None:
    for _ in trainer.steps(points()):
        called.append("the caller's code")


def by_training_step(trainer: Trainer, _called: list[str]) -> None:
    x, y = points().tensors
    for start in range(0, 8 * STEPS, 8):
        trainer.training_step((x[start : start + 8], y[start : start + 8]))


@pytest.mark.parametrize("way", [by_train, by_steps, by_training_step])
def test_each_way_to_train_hands_a_step_to_the_same_list(
    way: Callable[[Trainer, list[str]], None], consumed: list[str], tmp_path: Path
) -> None:
    trainer = Trainer(
        nn.Linear(4, 1),
        loss_fn=nn.functional.mse_loss,
        output_dir=tmp_path,
        max_steps=STEPS,
        batch_size=8,
        global_batch_size=8,
        seed=0,
        **({"eval_steps": 1} if way is by_train else {}),
    )
    way(trainer, consumed)
    # Evaluations are the caller's own but in `train`.
    afterwards = {
        by_train: ["evaluate_if_due", "save_if_due"],
        by_steps: ["the caller's code", "save_if_due"],
        by_training_step: ["save_if_due"],
    }[way]
    assert consumed == [*AT_ONCE, *afterwards] * STEPS


def test_an_error_of_an_evaluation_does_not_name_samples_of_the_training_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A worker of the validation data may die, and torch tells of both in the same words."""

    def died(_consumers: StepConsumers, _taken: Any) -> Iterator[None]:
        raise RuntimeError("DataLoader worker (pid 1) is killed by signal: Killed.")

    monkeypatch.setattr(StepConsumers, "evaluate_if_due", died)
    trainer = Trainer(nn.Linear(4, 1), loss_fn=nn.functional.mse_loss, batch_size=8, max_steps=1)
    with pytest.raises(RuntimeError, match="killed by signal"):
        trainer.train(points(), points())
