"""Ranks that do not make the same collective calls."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lockstep import Trainer
from lockstep.errors import RunError
from tests.faults.tiny import trainer
from tests.ranks import run_ranks


def one_call_too_many(folder: str) -> str:
    """Rank 1 makes a call of its own, of the size of the step's own sums, before step 4.

    Only the step's own sums are exchanged here: where other sizes meet, gloo itself notices.
    """
    run = trainer(
        Path(folder), distributed={"device": "cpu", "strategy": "ddp", "timeout_seconds": 20}
    )
    progress = run.step.progress
    for step in range(3):
        progress.step = step
        meet(run)
    progress.step = 3
    if dist.get_rank() == 1:
        columns = 2 + 2  # micro-batches, then token ids and votes
        dist.all_reduce(torch.zeros(2, columns, dtype=torch.float64))
    try:
        meet(run)
    except RunError as error:
        return f"RunError: {error}"
    except RuntimeError as error:
        return f"RuntimeError: {error}"
    return "went on"


def meet(run: Trainer) -> None:
    """What a step does of collectives when no gradient is to be reduced: its own sums, and the look
    at them.
    """
    accumulator = run.step.open(2)
    loss, _ = accumulator.totals()
    out_of_step = accumulator.step_marks - (run.step.progress.step + 1) * run.layout.world_size
    run.step.anomaly_detector.check(
        run.step.progress.step + 1, loss, loss, accumulator.stop_votes, out_of_step
    )


@pytest.mark.fault(
    "network: a rank makes a collective call that the others do not",
    "a collective inside of `if rank == 0`: gloo takes the next call of the others for it, and"
    " hands out sums of different things",
    "noticed in the same step, by a stamp that travels with the step's own sums (or by gloo, where"
    " sizes differ): exit code 1",
)
def test_trap_58_a_call_that_the_others_do_not_make_is_noticed(tmp_path: Path) -> None:
    """gloo silently pairs it with the next one, and the faster rank succeeds, with numbers that
    mean nothing.
    """
    said = run_ranks(one_call_too_many, 2, str(tmp_path))
    assert "went on" not in said, said
    assert any("the ranks did not meet in step 4" in text for text in said), said
