"""DataParallel: what is said and refused where one process has several GPUs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import Trainer
from lockstep.config import config_from
from lockstep.errors import UsageError
from lockstep.models.protocol import objective_of
from lockstep.parallel.replicas import data_parallel
from lockstep.parallel.replicas.data_parallel import over_parts, refuse_mean_losses
from lockstep.randomness import RandomState


def wrapped(monkeypatch: pytest.MonkeyPatch, **settings: object) -> tuple[nn.Module, list[str]]:
    """As on a machine with two GPUs; the model stays on the CPU."""
    monkeypatch.setattr(data_parallel, "num_gpus", lambda _device: 2)
    log_lines: list[str] = []
    config = config_from({"distributed.strategy": "dp", **settings}).step
    return (
        data_parallel.apply_dp(
            nn.Linear(2, 2), config, RandomState(1, torch.device("cpu")), log_lines
        ),
        log_lines,
    )


def test_it_says_that_ddp_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model, [line] = wrapped(monkeypatch)
    assert isinstance(model, nn.DataParallel)
    assert "2 GPUs share out each micro-batch" in line
    assert "ddp is faster" in line


@pytest.mark.parametrize(
    "setting", [{"training.compile": True}, {"training.gradient_checkpointing": "full"}]
)
def test_what_its_copies_would_share_is_refused(
    monkeypatch: pytest.MonkeyPatch, setting: dict[str, object]
) -> None:
    with pytest.raises(UsageError, match="dp does not work with") as error:
        wrapped(monkeypatch, **setting)
    assert "strategy: ddp" in str(error.value)


class ReturnsItsLoss(nn.Linear):
    def __init__(self, reduction: str) -> None:
        super().__init__(4, 3)
        self.loss_reduction = reduction

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return {
            "loss": F.cross_entropy(
                super().forward(x), y, reduction=self.loss_reduction, ignore_index=-1
            )
        }


class ReturnsANumber(ReturnsItsLoss):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x, y)["loss"]


BATCH = {"x": torch.randn(6, 4), "y": torch.tensor([0, -1, -1, 1, 2, 0])}


def of_two_parts(model: nn.Module) -> Any:
    """The outputs of two GPUs as DataParallel gathers them."""
    parts = [model(BATCH["x"][half], BATCH["y"][half]) for half in (slice(3), slice(3, 6))]
    if isinstance(parts[0], Tensor):
        return torch.stack(parts)
    return {"loss": torch.stack([part["loss"] for part in parts])}


@pytest.mark.parametrize("make", [ReturnsItsLoss, ReturnsANumber])
def test_a_mean_of_each_gpus_part_is_refused_and_a_sum_adds_up(
    make: Callable[[str], nn.Module],
) -> None:
    model = make("mean")
    objective = objective_of(model)
    refuse_mean_losses(model, objective, 1)
    with pytest.raises(UsageError, match=r"can't weigh a mean loss(.|\n)*strategy: ddp"):
        refuse_mean_losses(model, objective, 2)

    model = make("sum")
    objective = objective_of(model)
    refuse_mean_losses(model, objective, 2)
    whole = objective.summed(model(**BATCH), BATCH)
    torch.testing.assert_close(over_parts(objective).summed(of_two_parts(model), BATCH), whole)


def test_a_loss_function_gets_the_outputs_of_all_gpus() -> None:
    model = nn.Linear(4, 3)
    loss_fn = nn.CrossEntropyLoss(ignore_index=-1)
    objective = objective_of(model, loss_fn)
    refuse_mean_losses(model, objective, 2)
    outputs = model(BATCH["x"])
    _, _, count = over_parts(objective).factors(outputs, (BATCH["x"], BATCH["y"]))
    assert count == 4


def test_placing_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "num_gpus", lambda _device: 2)
    with pytest.raises(UsageError, match="can't weigh a mean loss"):
        Trainer(ReturnsItsLoss("mean"), strategy="dp")
