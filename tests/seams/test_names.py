"""Models, data sets, optimizers, schedules, losses and sinks of another package: CONTRIBUTING.md,
"Where things go".
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep import registry
from tests.ranks import REPOSITORY
from tests.seams import test_axis, test_strategy
from tests.seams.outside import Outside

THEIRS = """
import json
import os

import torch
from torch import nn
from torch.utils.data import Dataset

from memory_storage import MemoryStorage


class Line(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.linear = nn.Linear(width, 1)

    def forward(self, x):
        return self.linear(x).squeeze(-1)


class Points(Dataset):
    deterministic = True

    def __len__(self):
        return 32

    def __getitem__(self, index):
        x = torch.tensor([index % 3, index % 5, index % 7], dtype=torch.float32)
        return x, x.sum()


class Steady(torch.optim.SGD):
    pass


def halves(updates, schedule):
    return 0.5**updates


class Table:
    needs_run_directory = True

    def __init__(self, context):
        self.path = context.directory.path / "table.txt"
        self.total = context.total_steps

    def on_step(self, row):
        with self.path.open("a") as file:
            print(row["step"], "of", self.total, row["lr"], file=file)

    def on_eval(self, row):
        pass

    def close(self):
        pass


def apart(outputs, targets):
    return (outputs - targets).square().mean()


class Shelf(MemoryStorage):
    def __init__(self, label):
        super().__init__({})
        self.label = label

    def commit(self, draft, name, manifest):
        super().commit(draft, name, manifest)
        print("kept by", self.label, *self.names(), flush=True)


class NeedsMore:
    def __init__(self, context):
        import a_library_that_nobody_has
"""
EXAMPLE = REPOSITORY / "tests" / "checkpoint" / "memory_storage.py"
CONFIG = """
model: {name: "theirs:Line", args: {width: 3}}
loss_fn: "theirs:apart"
data: {name: "theirs:Points"}
training:
  {max_steps: 4, batch_size: 4, learning_rate: 0.01, optimizer: "theirs:Steady", lr_schedule: "theirs:halves",
   eval_steps: 3}
distributed: {device: cpu, strategy: single}
checkpoint: {save_steps: 4, storage: {name: "theirs:Shelf", args: {label: them}}}
monitor: {log_steps: 1, sinks: [jsonl, "theirs:Table", "theirs:NeedsMore"]}
"""


@pytest.fixture
def outside(tmp_path: Path) -> Outside:
    found = Outside(tmp_path)
    found.write("theirs.py", THEIRS)
    found.write("memory_storage.py", EXAMPLE.read_text())
    found.write("config.yaml", CONFIG)
    return found


def test_a_run_takes_all_of_them_from_another_package(outside: Outside) -> None:
    assert "ok: theirs:Line on theirs:Points" in outside.lockstep("config", "check", "config.yaml")
    said = outside.lockstep("train", "config.yaml", "--output-dir", "run")
    assert (
        "the sink theirs:NeedsMore is left out: No module named 'a_library_that_nobody_has'" in said
    )
    rows = [
        json.loads(line) for line in (outside.folder / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert [row["lr"] for row in rows] == pytest.approx([0.01, 0.005, 0.0025, 0.00125])
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert "kept by them step-00000004" in said
    assert "training.eval_steps means nothing without validation data" in said
    assert "let data.name make a pair (training, validation)" in said
    assert "train(…)" not in said  # that is Python's way to train
    assert not (outside.folder / "run/checkpoints").exists()
    written = (outside.folder / "run/table.txt").read_text().splitlines()
    assert written == [f"{row['step']} of 4 {row['lr']}" for row in rows]


def test_each_registry_has_a_newcomer_from_outside() -> None:
    """A registry is one table; the run above, or that of a strategy, takes a name from outside.

    Axes are named by a strategy, and not by a key: `tests/seams/test_axis.py` has one.
    """
    tables = [one for one in vars(registry).values() if isinstance(one, registry.Registry)]
    tables.remove(registry.AXES)
    assert f'axes = ("{test_axis.AXIS_NAME}",)' in test_axis.AXIS
    registry.AXES.require(test_axis.AXIS_NAME)
    assert {one.kind for one in tables} >= {
        "strategy",
        "model",
        "data set",
        "optimizer",
        "schedule",
    }
    for table in tables:
        found = {
            _value(yaml.safe_load(text), table.where) for text in (CONFIG, test_strategy.CONFIG)
        }
        newcomers = [name for name in found if name.split(":")[0] in ("theirs", "their.replicas")]
        assert newcomers, f"no test takes a {table.kind} from outside ({table.where})"
        table.require(newcomers[0])


def _value(config: Any, key: str) -> str:
    """Return the name at a dotted key: plain, of an object, or the first from outside in a list."""
    for part in key.split("."):
        config = config.get(part, {})
    if isinstance(config, list):
        return next((str(name) for name in config if ":" in name), "")
    return str(config.get("name") if isinstance(config, dict) else config)


def test_a_sink_without_a_method_is_refused_before_the_first_step(outside: Outside) -> None:
    """It ended the thread of all sinks, and with it metrics.jsonl."""
    outside.write(
        "short.py",
        "class Short:\n    def __init__(self, context): pass\n    def on_step(self, row): pass\n",
    )
    said = outside.lockstep("train", "config.yaml", "monitor.sinks=[jsonl, 'short:Short']", code=2)
    assert "short:Short has no method on_eval" in said
    assert "write def on_eval(self, row)" in said


@pytest.mark.parametrize(
    ("key", "value", "near"),
    [
        ("monitor.sinks", "[consol]", "write console"),
        ("training.lr_schedule", "cosin", "write cosine"),
        ("training.optimizer", "adamm", "write adam"),
        ("model.name", "bhd", "did you mean 'bdh'"),
        ("data.name", "tex", "did you mean 'text'"),
    ],
)
def test_a_name_that_is_near_is_told(key: str, value: str, near: str, outside: Outside) -> None:
    assert near in outside.lockstep("config", "check", "config.yaml", f"{key}={value}", code=2)
