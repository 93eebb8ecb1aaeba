"""The batch script in a real Slurm."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lockstep.cli import main
from tests.slurm_cluster import end_steps, output, slurm_cluster, until

pytestmark = pytest.mark.root
# In place of Python: says what it was given, and is preempted the first time.
_STUB = """
echo "node $SLURM_NODEID of $SLURM_JOB_NUM_NODES, start ${SLURM_RESTART_COUNT:-0}: $*" >> said
[ "${SLURM_RESTART_COUNT:-0}" -ge 1 ] && exit 0
exit 75
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with slurm_cluster(tmp_path, monkeypatch) as folder:
        yield folder


def test_a_job_runs_on_two_nodes_and_goes_back_into_the_queue_when_preempted(
    slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (slurm / "stub.sh").write_text(_STUB)
    (slurm / "small.yaml").write_text("model: {name: transformer}\ndata: {name: python-docs}\n")
    asked = (
        "small.yaml",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
        "distributed.device=cpu",
        "--python",
        "bash stub.sh",
    )
    assert main(["submit", "slurm", *asked, "--time", "5"]) == 0
    said_first, status, *_ = capsys.readouterr().out.splitlines()
    job = said_first.rpartition(" ")[2]
    assert job.isdigit()
    assert status == f"lockstep jobs status slurm:{job}"
    said = slurm / "said"
    until(
        lambda: said.exists() and "start 1" not in said.read_text() and _state(job) == "PENDING", 60
    )
    # a job that starts in the second of its requeue is killed: "Job credential revoked"
    time.sleep(3.0)
    # Slurm may put it off for two minutes nevertheless
    until(lambda: _at_once(job) in ("COMPLETED", "FAILED"), 300)
    assert _state(job) == "COMPLETED", output("scontrol", "show", "job", job)
    lines = said.read_text().splitlines()
    host = "n0"  # the first of the allocation
    meeting = f"--rdzv-endpoint {host}:{20000 + int(job) % 20000} --rdzv-id {job}"
    assert sorted(line.partition(":")[0] for line in lines) == [
        f"node {node} of 2, start {start}" for node in (0, 1) for start in (0, 1)
    ]
    assert all(
        "-m lockstep train small.yaml distributed.device=cpu --output-dir runs/small" in line
        for line in lines
    )
    assert all(line.endswith(f"--resume auto --nnodes 2 {meeting}") for line in lines)


# In place of Python: says that it runs, and what it was told to end by.
_WAITS = """
trap 'echo told to end; exit 75' TERM
echo "running"
touch running
while :; do sleep 0.1; done
"""


# A batch script that the end of its job doesn't reach comes to the line that asks for the queue.
@pytest.mark.parametrize("setup", ["true", "trap '' TERM"], ids=["plain", "script_outlives_it"])
def test_a_job_is_looked_at_read_and_ended(
    slurm: Path, capsys: pytest.CaptureFixture[str], setup: str
) -> None:
    (slurm / "stub.sh").write_text(_WAITS)
    (slurm / "small.yaml").write_text("model: {name: transformer}\ndata: {name: python-docs}\n")
    asked = ("small.yaml", "--nproc-per-node", "1", "distributed.device=cpu", "--setup", setup)
    assert main(["submit", "slurm", *asked, "--python", "bash stub.sh"]) == 0
    status, logs, cancel = (line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:])

    def told(command: list[str]) -> str:
        assert main(command) == 0
        return capsys.readouterr().out

    until((slurm / "running").exists, 120)
    assert told(status).startswith("RUNNING\nmachines: n0\n")
    until(lambda: told(logs) == "running\n", 60)
    told(cancel)
    until(lambda: "told to end" in told(logs), 60)
    # COMPLETING, and then the end; back in the queue it would be PENDING
    until(lambda: not told(status).startswith("COMPLETING"), 120)
    assert told(status).startswith("CANCELLED")


def _at_once(job: str) -> str:
    """The state of a job that Slurm would put off for two minutes: asked for again, for it may do
    so after we asked.
    """
    state = _state(job)
    if state == "PENDING":
        subprocess.run(["scontrol", "update", f"jobid={job}", "StartTime=now"], check=False)
    return state


def _state(job: str) -> str:
    told = output("scontrol", "show", "job", job)
    return next(
        (word.partition("=")[2] for word in told.split() if word.startswith("JobState=")), ""
    )


def test_steps_of_killed_jobs_end_with_their_cluster(tmp_path: Path) -> None:
    """One was left behind by a job that was killed whole; those of other clusters stay."""
    program = tmp_path / "slurmstepd"
    sleep = shutil.which("sleep")
    assert sleep is not None
    shutil.copy(sleep, program)
    steps = [
        subprocess.Popen([program, "600"], env={**os.environ, "SLURM_CONF": str(conf)})
        for conf in (tmp_path / "slurm.conf", tmp_path / "other.conf")
    ]
    try:
        end_steps(tmp_path / "slurm.conf")
        assert not psutil.pid_exists(steps[0].pid)
        assert steps[1].poll() is None
    finally:
        for step in steps:
            step.kill()
            step.wait()
