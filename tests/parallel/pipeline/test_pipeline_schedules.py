"""What schedules of pipelines promise, measured on four ranks: activations that are kept, and the
time of a step.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import TensorDataset

from benchmarks.pipeline_schedules import Case, one
from lockstep.parallel.pipeline.schedules import timeline
from tests.parallel.pipeline.pipeline_cases import piped, trainer_of
from tests.ranks import run_ranks

RANKS = 4
MICRO_BATCHES = 8
WIDTH = 16
SEGMENTS = 8
KEPT = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}  # schedule → stages a rank
SECONDS = 0.06  # of a rank's part of a forward pass, and of each half of its backward pass


class Saved:
    """A tensor that the backward pass needs; `alive` are the bytes of those that there are."""

    alive = most = total = 0

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.bytes = tensor.numel() * tensor.element_size()
        Saved.alive += self.bytes
        Saved.total += self.bytes
        Saved.most = max(Saved.most, Saved.alive)

    def __del__(self) -> None:
        Saved.alive -= self.bytes


def kept_while_training(schedule: str) -> float:
    """The most bytes of activations that this rank keeps in a step, in those of one micro-batch on
    one stage.
    """
    outputs = [WIDTH] * (SEGMENTS - 1) + [1]  # so that the loss keeps next to nothing
    layers = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, width))
        for width in outputs
    ]
    sizes = {
        "training.batch_size": 1,
        "training.global_batch_size": MICRO_BATCHES,
        "training.max_steps": 2,
    }
    trainer = trainer_of(nn.Sequential(*layers), {**piped(schedule), **sizes}, nn.MSELoss())
    weights = {
        parameter.untyped_storage().data_ptr() for parameter in trainer.placed.parameters.values()
    }

    def pack(tensor: Tensor) -> Any:
        return tensor if tensor.untyped_storage().data_ptr() in weights else Saved(tensor)

    steps = trainer.steps(TensorDataset(torch.ones(32, WIDTH), torch.ones(32, 1)))
    next(steps)
    Saved.most = Saved.alive
    Saved.total = 0
    with saved_tensors_hooks(
        pack, lambda packed: packed.tensor if isinstance(packed, Saved) else packed
    ):
        next(steps)
    return Saved.most / (Saved.total / (MICRO_BATCHES * KEPT[schedule]))


def seconds_of_a_step(schedule: str, repeats: int = 3) -> float:
    """The shortest step of a model that sleeps as long on each rank, however many stages that
    holds.
    """
    stages = KEPT[schedule]
    return min(one(Case(schedule, RANKS, stages, RANKS), SECONDS / stages, repeats))


def measure() -> dict[str, Any]:
    return {
        "kept": {schedule: kept_while_training(schedule) for schedule in KEPT},
        "seconds": {schedule: seconds_of_a_step(schedule) for schedule in KEPT},
    }


@cache
def measured() -> list[dict[str, Any]]:
    return run_ranks(measure, RANKS, timeout=300)


@pytest.mark.parametrize("schedule", KEPT)
def test_ranks_keep_the_activations_that_config_show_says(schedule: str) -> None:
    """GPipe those of all micro-batches, 1F1B those of as many as there are stages from
    a rank on.
    """
    said = timeline(schedule, RANKS, KEPT[schedule], MICRO_BATCHES).kept()
    assert schedule != "GPipe" or said == [8, 8, 8, 8]
    assert schedule != "1F1B" or said == [4, 3, 2, 1]
    for rank, found in enumerate(measured()):
        assert found["kept"][schedule] == pytest.approx(said[rank], abs=0.3), (
            rank,
            found["kept"],
            said,
        )


def test_interleaved_stages_make_the_same_step_shorter() -> None:
    """In theory 16.5 for 21 times a rank's forward pass, of four micro-batches on four ranks."""
    slowest = {
        schedule: max(found["seconds"][schedule] for found in measured()) for schedule in KEPT
    }
    assert slowest["Interleaved1F1B"] < 0.93 * slowest["1F1B"], slowest
    assert slowest["1F1B"] == pytest.approx(slowest["GPipe"], rel=0.1), slowest
