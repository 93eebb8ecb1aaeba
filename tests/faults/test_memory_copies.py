"""Ranks that are started again go on from the copy in memory, with real ranks and real kills."""

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.checkpoint import (
    DamagedError,
    MemoryStorage,
    MemoryWriter,
    digest,
    list_checkpoints,
    read_manifest,
    step_of,
    verify,
)
from lockstep.machine.environment import MEMORY
from lockstep.trainer.after_step import StepConsumers, TakenStep
from tests.faults.test_processes import ranks_of
from tests.faults.tiny import YAML, Points, events, hold, samples_of, steps, trainer
from tests.launch.shared import Ended, finish, start, wait_for

TWO = ("train", "tiny.yaml", "--nproc-per-node", "2", "--max-restarts", "2", "--output-dir")
COPIES = ("checkpoint.memory_steps=3", "checkpoint.save_steps=1000")


class Killed(NamedTuple):
    """A run of which a rank was killed, and went on to its end."""

    ended: Ended
    recorded: int  # the last step that was recorded before the kill

    @property
    def run(self) -> Path:
        return self.ended.folder / "run"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """Rank 1 is killed after a copy in memory, and no checkpoint of the run is on disk yet."""
    folder = tmp_path_factory.mktemp("memory")
    (folder / "tiny.yaml").write_text(YAML)
    hold(folder, 10)
    process = start(folder, *TWO, "run", *COPIES, OMP_NUM_THREADS="1")
    wait_for(lambda: process.poll() is not None or bool(events(folder / "run", "memory_copy")))
    wait_for(lambda: process.poll() is not None or max(steps(folder / "run"), default=0) >= 10)
    assert process.poll() is None, process.communicate()
    recorded = max(steps(folder / "run"))
    os.kill(ranks_of(folder)[1], signal.SIGKILL)
    hold(folder, None)
    return Killed(finish(process, folder), recorded)


@pytest.mark.fault(
    "process: all ranks are killed between saves, `checkpoint.memory_steps: k`",
    "nobody is left to go on from the copy in memory",
    "the launcher saves the newest whole copy among the run's checkpoints, if it is newer, and ends"
    " with one error",
)
def test_the_newest_copy_is_saved_when_a_launch_ends_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(YAML)
    hold(tmp_path, 10)
    live = ("distributed.on_failure=continue", "distributed.strategy=fsdp")
    process = start(tmp_path, *TWO[:4], "--output-dir", "run", *COPIES, *live, OMP_NUM_THREADS="1")
    wait_for(lambda: process.poll() is not None or max(steps(tmp_path / "run"), default=0) >= 10)
    assert process.poll() is None, process.communicate()
    ranks = ranks_of(tmp_path)
    for pid in ranks.values():
        os.kill(pid, signal.SIGSTOP)  # so that the launcher finds both of them dead at once
    for pid in ranks.values():
        os.kill(pid, signal.SIGKILL)
    ended = finish(process, tmp_path)
    assert ended.code == 1
    assert "killed by SIGKILL" in ended.err
    (saved,) = list_checkpoints(tmp_path / "run/checkpoints")
    assert f"lockstep: the newest copy in memory is saved: {Path('run', *saved.parts[-2:])}" in (
        ended.err
    )
    assert (step_of(saved.name) or 0) >= 6
    assert verify(saved) == []
    assert [event["checkpoint"] for event in events(tmp_path / "run", "save")] == [saved.name]


@pytest.mark.fault(
    "process: a rank is killed between saves, `checkpoint.memory_steps: k`",
    "the newest checkpoint on disk may be hundreds of steps old; the copy in memory is not",
    "the ranks are started again, and go on from the copy: at most k - 1 recorded steps are"
    " trained again",
)
def test_ranks_go_on_from_memory(killed: Killed) -> None:
    assert killed.ended.code == 0, killed.ended.err
    run = killed.run
    (resumed,) = events(run, "resume")
    assert "/dev/shm/lockstep-memory-" in resumed["checkpoint"]
    assert resumed["step"] % 3 == 0
    # steps may be taken between the test's last look and its kill, so a later copy is right too
    assert resumed["step"] >= killed.recorded - killed.recorded % 3, (
        "complete before it is recorded"
    )
    first, _after_restart = events(run, "memory_copy")
    assert first["bytes"] > 0
    assert first["every"] == 3
    assert steps(run) == list(range(1, 41)), "each step once"


def test_the_digest_is_the_undisturbed_ones(killed: Killed, tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(YAML)
    process = start(tmp_path, *TWO, "run", "checkpoint.save_steps=1000", OMP_NUM_THREADS="1")
    undisturbed = finish(process, tmp_path)
    assert undisturbed.code == 0, undisturbed.err
    last = "checkpoints/step-00000040"
    assert digest(killed.run / last) == digest(tmp_path / "run" / last)


def complete_copies(memory: MemoryStorage) -> list[int]:
    """The steps whose copies all ranks have written, visible or not."""
    found = []
    for name in memory.names():
        with suppress(DamagedError):
            found.append(read_manifest(memory.path(name)).step)
    return sorted(found)


def test_a_step_is_recorded_once_its_copy_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a death could cost a recorded step. An evaluation comes before the copy of its step."""
    monkeypatch.setenv(MEMORY, str(tmp_path / "memory"))
    record = StepConsumers.record
    evaluate = StepConsumers.evaluate_if_due
    seen: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}

    def noted(consumers: StepConsumers, taken: TakenStep) -> None:
        assert consumers.run.output.memory is not None
        seen[consumers.run.step.progress.step] = complete_copies(consumers.run.output.memory)
        record(consumers, taken)

    def evaluated(consumers: StepConsumers, taken: TakenStep) -> None:
        assert consumers.run.output.memory is not None
        after[consumers.run.step.progress.step] = consumers.run.output.memory.steps
        evaluate(consumers, taken)

    monkeypatch.setattr(StepConsumers, "record", noted)
    monkeypatch.setattr(StepConsumers, "evaluate_if_due", evaluated)
    training = {"max_steps": 6, "eval_steps": 4}
    run = trainer(tmp_path / "run", training=training, checkpoint={"memory_steps": 1})
    run.train(Points(), Points())
    assert seen == {1: [1], 2: [1, 2], 3: [2, 3], 4: [3], 5: [4, 5], 6: [5]}
    assert after == {1: [1], 2: [2], 3: [3], 4: [3], 5: [5], 6: [5]}


def test_the_caller_s_code_of_a_step_comes_before_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it changes is in the copy."""
    monkeypatch.setenv(MEMORY, str(tmp_path / "memory"))
    run = trainer(tmp_path / "run", training={"max_steps": 4}, checkpoint={"memory_steps": 1})
    memory = run.state.output.memory
    assert memory is not None
    seen = [memory.steps for _record in run.steps(Points())]
    assert seen == [[], [1], [2], [3]]


def test_steps_that_are_made_again_are_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEMORY, str(tmp_path / "memory"))
    commit = MemoryWriter.commit
    copied: list[int] = []

    def noted(writer: MemoryWriter, step: int) -> None:
        copied.append(step)
        commit(writer, step)

    monkeypatch.setattr(MemoryWriter, "commit", noted)
    bad = {"max_steps": 12, "bad_numbers": {"action": "rollback"}}
    saves = {"memory_steps": 3, "save_steps": 4}
    run = trainer(tmp_path / "run", training=bad, checkpoint=saves)
    run.train(Points(nan=(samples_of(7)[0][0],)))
    assert copied == [3, 6, 6, 9]


def test_nothing_stays_in_memory(killed: Killed) -> None:
    (resumed,) = events(killed.run, "resume")
    assert not Path(resumed["checkpoint"]).parents[1].exists()
