"""Runs on a real cluster of Ray, whose machines are processes on this one."""

import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep import checkpoint
from lockstep.cli import main
from lockstep.run_directory.records import RunDirectory
from tests import ray_cluster
from tests.ray_cluster import RayCluster, wait_until

ray_cluster.require_ray()
pytestmark = [pytest.mark.full, pytest.mark.timeout(3600)]

CONFIG = """
model: {name: "tests.faults.tiny:Net"}
data: {name: "tests.faults.tiny:Points"}
training: {batch_size: 4, global_batch_size: 8}
# a rank has the same number of threads beside another one as alone: their number changes bits
distributed: {device: cpu, strategy: ddp, env: {OMP_NUM_THREADS: "1"}}
checkpoint: {save_steps: 20}
monitor: {log_steps: 1, sinks: [jsonl]}
"""


class Jobs:
    """Submits runs, and asks for them, as a user does."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def submit(self, *argv: str) -> str:
        options = ["--python", sys.executable]
        options += [] if "--output-dir" in argv else ["--output-dir", "run"]
        said = self._said("submit", "ray", "train.yaml", *options, *argv)
        return said.splitlines()[1].split()[3]

    def ask(self, verb: str, job: str) -> str:
        return self._said("jobs", verb, job)

    def has_ended(self, job: str) -> bool:
        return self.ask("status", job).split()[0] in ("SUCCEEDED", "FAILED", "STOPPED")

    def _said(self, *argv: str) -> str:
        assert main(list(argv)) == 0
        return self._capsys.readouterr().out


def saved(run: RunDirectory) -> int:
    newest = checkpoint.newest(run.checkpoints)
    return 0 if newest is None else checkpoint.step_of(newest.name) or 0


def events(run: RunDirectory, kind: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["kind"] == kind]


def test_a_run_is_cancelled_goes_on_and_outlives_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text(CONFIG)
    run = RunDirectory(tmp_path / "run")
    jobs = Jobs(capsys)
    with ray_cluster.ray_cluster(monkeypatch) as cluster:
        for _ in range(2):
            cluster.add_machine(cpus=1)
        two = ("--nnodes", "2", "--nproc-per-node", "1")
        _is_cancelled(jobs, run, *two)
        _outlives_a_machine(jobs, run, cluster, *two)
        steps = saved(run) + 25
        job = jobs.submit(*two, f"training.max_steps={steps}")
        wait_until(lambda: jobs.has_ended(job), "the end")
        said = jobs.ask("logs", job)
        assert jobs.ask("status", job).startswith("SUCCEEDED"), said
        assert "[0] lockstep: strategy ddp" in said
        wrong = jobs.submit(*two, "data.name=tests.faults.tiny:Nothing")
        wait_until(lambda: jobs.has_ended(wrong), "an end with an error")
        assert jobs.ask("status", wrong).startswith("FAILED")
        assert "exit code: 2" in jobs.ask("status", wrong)
        assert jobs.ask("cancel", wrong) == f"{wrong} has ended already\n"
        assert main(["jobs", "status", "ray:none"]) == 1
        assert "Ray refuses it at" in capsys.readouterr().err
        _is_given_up(jobs, cluster, *two)
    recorded = [row["step"] for row in run.read_metrics()]
    assert recorded == list(range(1, steps + 1))
    straight = ["train", "train.yaml", "--output-dir", "straight", "--nproc-per-node", "2"]
    assert main([*straight, f"training.max_steps={steps}"]) == 0
    name = f"checkpoints/step-{steps:08d}"
    assert checkpoint.digest(run.path / name) == checkpoint.digest(f"straight/{name}")


def _is_cancelled(jobs: Jobs, run: RunDirectory, *options: str) -> None:
    """The ranks save before they leave."""
    job = jobs.submit(*options, "training.max_steps=1000000")
    wait_until(lambda: saved(run) > 0, "a checkpoint")
    assert jobs.ask("status", job).startswith("RUNNING")
    assert jobs.ask("cancel", job) == f"{job} is told to end\n"
    wait_until(lambda: jobs.has_ended(job), "the end of a job that was cancelled")
    assert jobs.ask("status", job).startswith("STOPPED")
    assert saved(run) == run.recorded_step, jobs.ask("logs", job)


def _outlives_a_machine(jobs: Jobs, run: RunDirectory, cluster: RayCluster, *options: str) -> None:
    """One is killed whole; Ray gives the run another one, and it goes on."""
    before = saved(run)
    job = jobs.submit(*options, "training.max_steps=1000000")
    wait_until(lambda: saved(run) > before, "a checkpoint after the cancelled job's")
    assert [event["step"] for event in events(run, "resume")] == [before]
    cluster.kill_machine(cluster.machines[-1])
    wait_until(lambda: "is lost: " in jobs.ask("logs", job), "the loss, in the log")
    cluster.add_machine(cpus=1)
    wait_until(lambda: len(events(run, "resume")) > 1, "another start")
    reached = events(run, "resume")[1]["step"]
    wait_until(lambda: saved(run) > reached, "a checkpoint after the machine was lost")
    jobs.ask("cancel", job)
    wait_until(lambda: jobs.has_ended(job), "the end of a job that was cancelled again")


def _is_given_up(jobs: Jobs, cluster: RayCluster, *options: str) -> None:
    """More machines are lost than are replaced."""
    other = RunDirectory(Path("other"))
    never = ("--max-losses", "0", "--output-dir", "other", "training.max_steps=1000000")
    job = jobs.submit(*options, *never)
    wait_until(lambda: saved(other) > 0, "a checkpoint of another run")
    cluster.kill_machine(cluster.machines[-1])
    wait_until(lambda: jobs.has_ended(job), "an end after a loss")
    assert jobs.ask("status", job).startswith("FAILED")
    assert "1 machines were lost" in jobs.ask("logs", job)
