"""What ranks hold is seen of every rank, whatever rank 0 lacks."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lockstep.errors import RunError
from lockstep.verify.comparison_result import Outcome
from lockstep.verify.script.comparison import ScriptComparison
from lockstep.verify.script.record import ScriptRecord, TensorPiece
from lockstep.verify.script.runs import Runs
from lockstep.verify.script.task import ScriptTask
from lockstep.verify.script.values import say_length
from lockstep.verify.script.world import World


def test_a_gradient_that_rank_0_lacks_is_given_to_one_process(tmp_path: Path) -> None:
    pieces = {name: TensorPiece(torch.ones(2), (2,)) for name in ("used", "other")}
    runs = Runs(ScriptTask("train.py", (), 1, tmp_path), lambda *_: None, print)
    comparison = ScriptComparison(runs, Outcome("2 ranks", 2))
    comparison.world = World([ScriptRecord(first=pieces) for _ in range(2)])
    gradients = comparison.on_ranks([{"used": pieces["used"]}, pieces])
    assert {name: len(ranks) for name, ranks in gradients.items()} == {"used": 2, "other": 1}


def test_ranks_that_run_once_more_take_no_step_beyond_the_one_that_differs(tmp_path: Path) -> None:
    """A failing verdict traces each operation, which takes longer than all else."""
    taken: list[ScriptTask] = []

    def start(tasks: Sequence[ScriptTask], _ranks: int) -> None:
        taken.extend(tasks)
        raise RunError("no rank is needed")

    runs = Runs(ScriptTask("train.py", (), 3, tmp_path), start, lambda _line: None)
    comparison = ScriptComparison(runs, Outcome("2 ranks", 2))
    with pytest.raises(RunError):
        comparison.rerun("with each operation traced", 1, traced=True)
    assert [(task.steps, task.conditions.traced) for task in taken] == [(2, True)]


def test_a_loader_says_a_length_of_another_run_and_gives_the_batches_that_it_has() -> None:
    """A schedule asks for it: with a rank's number of batches one process has the rank's rate."""
    loader = DataLoader(TensorDataset(torch.arange(7)), batch_size=2)
    say_length(loader, 3)
    assert len(loader) == 3
    assert len([*loader]) == 4
    assert len(DataLoader(TensorDataset(torch.arange(7)), batch_size=2)) == 4
