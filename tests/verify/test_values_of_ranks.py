"""What ranks hold is seen of every rank, whatever rank 0 lacks."""

from pathlib import Path

import torch

from lockstep.verify.comparison_result import Outcome
from lockstep.verify.script.comparison import ScriptComparison
from lockstep.verify.script.record import ScriptRecord, TensorPiece
from lockstep.verify.script.runs import Runs
from lockstep.verify.script.task import ScriptTask
from lockstep.verify.script.world import World


def test_a_gradient_that_rank_0_lacks_is_given_to_one_process(tmp_path: Path) -> None:
    pieces = {name: TensorPiece(torch.ones(2), (2,)) for name in ("used", "other")}
    runs = Runs(ScriptTask("train.py", (), 1, tmp_path), lambda *_: None, print)
    comparison = ScriptComparison(runs, Outcome("2 ranks", 2))
    comparison.world = World([ScriptRecord(first=pieces) for _ in range(2)])
    gradients = comparison.on_ranks([{"used": pieces["used"]}, pieces])
    assert {name: len(ranks) for name, ranks in gradients.items()} == {"used": 2, "other": 1}
