"""How a run ends: asked to stop while it evaluates, by an error while a save is under way, and at
its last step.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep import Trainer, checkpoint
from lockstep.checkpoint import commit
from lockstep.errors import RunError
from tests.faults.tiny import Points, events, trainer
from tests.ranks import run_ranks

TRAINING = {"max_steps": 4, "batch_size": 4, "global_batch_size": 8, "eval_steps": 2}


class Interrupted(Points):
    """Ask a run to stop while its first micro-batches are read."""

    run: Trainer | None = None

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.run is not None:
            self.run.step.stop_asked = True
        return super().__getitem__(index)


def evaluations(folder: Path) -> dict[int, float]:
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    return {row["step"]: row["eval_loss"] for row in map(json.loads, rows) if "eval_loss" in row}


def made(folder: Path, **training: Any) -> Trainer:
    return trainer(folder, training=TRAINING | training, checkpoint={"save_steps": 10})


def stopped_while_evaluating(folder: Path, first_step: int) -> dict[str, Any]:
    """Rank 1 is asked to stop while step `first_step` is evaluated; then the run goes on."""
    run = made(folder, eval_steps=first_step)
    data = Interrupted()
    if dist.get_rank() == dist.get_world_size() - 1:
        data.run = run
    run.train(Points(), data)
    dist.barrier()  # rank 0 has written
    said = {
        "stopping": run.step.stopping,
        "step": run.step.progress.step,
        "before": evaluations(folder),
        "saved": [path.name for path in checkpoint.list_checkpoints(folder / "checkpoints")],
    }
    again = made(folder, eval_steps=first_step)
    again.resume("auto")
    again.train(Points(), Points())
    dist.barrier()
    return said | {"after": evaluations(folder), "finished": again.step.progress.step}


def limited(folder: Path) -> list[float]:
    """The loss of the first micro-batches, by their number."""
    return [
        made(folder, eval_batches=count, max_steps=1).evaluate(Points())
        for count in (1, 5, 18, 24, 100)
    ]


def an_error_on_one_rank(folder: Path) -> list[str]:
    """The last rank fails in the step after a save was begun; say what is saved when its error
    comes out.
    """

    class Failing(Points):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            if last and (folder / "begun").exists():
                raise ValueError("a sample that can't be read")
            return super().__getitem__(index)

    def slowly(*arguments: Any) -> Path:
        (folder / "begun").touch()
        time.sleep(1.0)
        return once(*arguments)

    once = commit.write_once
    last = dist.get_rank() == dist.get_world_size() - 1
    commit.write_once = slowly
    run = trainer(
        folder,
        training={**TRAINING, "max_steps": 200, "eval_steps": None},
        checkpoint={"save_steps": 1},
    )
    try:
        run.train(Failing(seconds=0.01))
    except (RuntimeError, RunError):  # the other rank's: its peer is gone
        return [path.name for path in checkpoint.list_checkpoints(folder / "checkpoints")]
    raise AssertionError("nothing failed")


def each_end(name: str) -> dict[str, Any]:
    folder = Path(name)
    said: dict[str, Any] = {"whole": None, "limited": limited(folder / "limited")}
    made(folder / "whole").train(Points(), Points())
    dist.barrier()
    said["whole"] = evaluations(folder / "whole")
    for step in (2, 4):
        said[f"stopped {step}"] = stopped_while_evaluating(folder / f"stopped-{step}", step)
    # the last: the other rank loses its peer
    said["error"] = an_error_on_one_rank(folder / "error")
    return said


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ends")
    (folder / "error").mkdir()
    return folder, run_ranks(each_end, 2, str(folder))


@pytest.mark.parametrize("step", [2, 4], ids=["in the middle", "at the end"])
@pytest.mark.fault(
    "process: preempted while it evaluates",
    "SIGTERM comes in an evaluation, in the middle of a run or after its last step",
    "the ranks agree to end the evaluation, the run is saved, the exit code is 75; started again,"
    " it makes up for the evaluation",
)
def test_an_evaluation_stops_when_asked(ends: tuple[Path, list[dict[str, Any]]], step: int) -> None:
    for said in ends[1]:
        found = said[f"stopped {step}"]
        assert found["stopping"]
        assert found["step"] == step
        assert found["saved"] == [f"step-{step:08}"]
        assert step not in found["before"]
        assert found["finished"] == 4
        assert found["after"] == {each: said["whole"][each] for each in (2, 4) if each >= step}


def test_the_last_save_comes_before_the_last_evaluation(
    ends: tuple[Path, list[dict[str, Any]]],
) -> None:
    """A preemption with a short grace must not lose the end of a run to its evaluation."""
    (save,) = events(ends[0] / "whole", "save")
    *_, last = map(json.loads, (ends[0] / "whole/metrics.jsonl").read_text().splitlines())
    assert save["step"] == last["step"] == 4
    assert save["time"] < last["time"]


def test_eval_batches_counts_micro_batches_of_all_ranks(
    ends: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    """One process and two ranks evaluate the same samples."""
    alone = limited(tmp_path)
    assert ends[1][0]["limited"] == ends[1][1]["limited"] == pytest.approx(alone, rel=1e-6)
    run = made(tmp_path, max_steps=1)
    first = [
        run.evaluate(torch.utils.data.Subset(Points(), range(4 * count)))
        for count in (1, 5, 18, 24, 24)
    ]
    assert alone == pytest.approx(first, rel=1e-6)
    assert len(set(alone)) == 4


@pytest.mark.fault(
    "process: an error while a save is under way in the background",
    "a rank raises in the steps after a save has begun",
    "the save is finished before the error ends the run: the checkpoint is there",
)
def test_an_error_does_not_lose_the_save_under_way(ends: tuple[Path, list[dict[str, Any]]]) -> None:
    assert "step-00000001" in ends[1][1]["error"]


def test_a_preempted_run_is_not_evaluated(tmp_path: Path) -> None:
    """Its time is short; the run that goes on from there evaluates."""
    run = made(tmp_path)
    run.step.stop_asked = True
    run.train(Points(), Points())
    assert (run.step.progress.step, evaluations(tmp_path)) == (1, {})
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "checkpoints")] == [
        "step-00000001"
    ]


_LEFT_OPEN = """
import torch
from lockstep import Trainer
from tests.faults.tiny import Net, Points

loops = []
for _ in range(2):
    loops.append(Trainer(Net(), batch_size=4).steps(Points()))
    next(loops[-1])
"""


@pytest.mark.full
def test_a_loop_over_steps_that_is_left_before_its_end_says_nothing_when_python_ends() -> None:
    """Modules are emptied before the generators that refer to them end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(  # a fresh process: it is about how Python ends
        [sys.executable, "-c", _LEFT_OPEN],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_a_loop_that_is_left_is_saved_when_its_trainer_is_gone(tmp_path: Path) -> None:
    """Nothing that a trainer holds refers to it, so that it goes at once, with what
    ends its run.
    """
    run = made(tmp_path)
    for start in (0, 4):  # the two micro-batches of a step
        run.training_step(torch.utils.data.default_collate([Points()[start + i] for i in range(4)]))
    assert not checkpoint.list_checkpoints(tmp_path / "checkpoints")
    del run
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "checkpoints")] == [
        "step-00000001"
    ]
