"""The smallest run there is: 96 points, a network of 65 numbers, and a config for it."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep import Trainer
from lockstep.config import Config
from lockstep.heartbeat.writer import went_forward
from lockstep.machine.signals import asked_to_end
from lockstep.run_directory.records import RunDirectory
from lockstep.run_directory.run_files import replace_file


class Points(Dataset[dict[str, Tensor]]):
    """96 points; some may hold a number that is none, or one that is far too large.

    A run can be held at a step (`hold`).
    """

    deterministic = True

    def __init__(
        self, nan: tuple[int, ...] = (), huge: tuple[int, ...] = (), seconds: float = 0.0
    ) -> None:
        self.nan = nan
        self.huge = huge
        self.seconds = seconds

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(0.0 if os.path.exists("hurry") else self.seconds)
        wait_while_held(Path("run"))
        value = float("nan") if index in self.nan else 1e4 if index in self.huge else 1.0
        return {"x": torch.linspace(0, 1, 4) * (1 + index / 64), "y": torch.full((1,), value)}


class Net(nn.Module):
    """Two layers with a BatchNorm between them, which remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)

    def init_weights(self) -> None:
        for layer in (self.first, self.last):
            nn.init.normal_(layer.weight, std=0.1)
            nn.init.zeros_(layer.bias)
        self.norm.reset_parameters()

    def inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor]:
        return (batch["x"],)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.relu(self.norm(self.first(x))))
        return out

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return ((outputs - batch["y"]) ** 2).sum()

    def count(self, batch: dict[str, Tensor]) -> int:
        return len(batch["x"])


class Chain(Net):
    """The same in three parts, one after the other, which pipelines can have on several ranks."""

    def segments(self) -> list[tuple[str, nn.Module]]:
        return [("first", self.first), ("norm", self.norm), ("last", self.last)]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


def config(**sections: dict[str, Any]) -> Config:
    """12 steps of 2 × 4 points, a checkpoint every 2; sections are merged."""
    base: dict[str, dict[str, Any]] = {
        "training": {"max_steps": 12, "batch_size": 4, "global_batch_size": 8, "eval_steps": None},
        "distributed": {"device": "cpu"},
        "checkpoint": {"save_steps": 2, "save_total_limit": None, "retries": 0},
        "monitor": {"log_steps": 1, "sinks": ["jsonl"]},
    }
    return Config.model_validate(
        {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}
    )


def trainer(folder: Path, **sections: dict[str, Any]) -> Trainer:
    """On this process, or on the ranks that it belongs to."""
    with torch.device("meta"):
        net = Net()  # its first values follow from the seed
    return Trainer(net, config=config(**sections), output_dir=folder)


_HELD = "held-at"


def hold(folder: Path, step: int | None) -> None:
    """Hold the runs in a folder once they have recorded this step; None: let them go.

    So a run does not end before a test has done what it does. It may take one step more.
    """
    path = folder / _HELD
    if step is None:
        path.unlink(missing_ok=True)
    else:
        replace_file(path, str(step))


def wait_while_held(run: Path) -> None:
    """Wait, in the data set of a run, until it may go on, or is asked to end."""
    while _is_held(run) and not asked_to_end():
        went_forward()  # it does not hang
        time.sleep(0.02)


def _is_held(run: Path) -> bool:
    try:
        step = int(Path(_HELD).read_text())
    except FileNotFoundError:
        return False
    return max(steps(run), default=0) >= step


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in RunDirectory(folder).read_events() if event["kind"] == kind]


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in RunDirectory(folder).read_metrics() if "loss" in row]


def samples_of(step: int) -> list[list[int]]:
    """The micro-batches of a step, counted from 1, as dataset indices."""
    from lockstep.data import SampleOrder

    return SampleOrder(96, 4, 8, seed=1337).samples_of(step - 1).micro_batches


YAML = """
model: {name: "tests.faults.tiny:Net"}
data: {name: "tests.faults.tiny:Points", args: {seconds: 0.02}}
training: {max_steps: 40, batch_size: 4, global_batch_size: 8, eval_steps: null}
distributed: {device: cpu, hang: {factor: 5, seconds: 4}}
checkpoint: {save_steps: 5, save_total_limit: null}
monitor: {log_steps: 1, sinks: [jsonl]}
"""
