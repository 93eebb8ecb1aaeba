"""The batch script in a real Slurm: munge, slurmctld and two slurmd on this machine, for these
tests alone.

Debian has them: apt-get install slurmctld slurmd slurm-client munge. Needs root, as slurmd does.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.cli import main
from tests.ranks import free_port

pytestmark = pytest.mark.root
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,batch_sched_delay=0
MinJobAge=600
ReturnToService=2
JobRequeue=1
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=main Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
"""
# In place of Python: says what it was given, and is preempted the first time.
_STUB = """
echo "node $SLURM_NODEID of $SLURM_JOB_NUM_NODES, start ${SLURM_RESTART_COUNT:-0}: $*" >> said
[ "${SLURM_RESTART_COUNT:-0}" -ge 1 ] && exit 0
exit 75
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    missing = [
        tool for tool in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(tool) is None
    ]
    if os.geteuid() != 0 or missing:
        pytest.skip(
            "NOT TESTED: needs root and a Slurm on this machine (missing:"
            f" {', '.join(missing) or 'root'})"
        )
    for folder in ("state", "spool-n0", "spool-n1"):
        (tmp_path / folder).mkdir()
    tmp_path.chmod(0o755)
    key = tmp_path / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = tmp_path / "slurm.conf"
    ports = [free_port() for _ in range(3)]
    conf.write_text(
        _CONF.format(host=socket.gethostname().split(".")[0], folder=tmp_path, ports=ports)
    )
    monkeypatch.setenv("SLURM_CONF", str(conf))
    monkeypatch.chdir(tmp_path)
    munged = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={tmp_path}/munge.socket",
        f"--pid-file={tmp_path}/munge.pid",
        f"--log-file={tmp_path}/munge.log",
        f"--seed-file={tmp_path}/seed",
    ]
    daemons = [
        munged,
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n0"],
        ["slurmd", "-D", "-N", "n1"],
    ]
    running = []
    try:
        for command in daemons:
            log = (
                tmp_path / f"{'-'.join(command[:1] + command[-1:])}.out".replace("/", "_")[-60:]
            ).open("w")
            running.append(subprocess.Popen(command, stdout=log, stderr=log))
            time.sleep(0.5)
        _until(lambda: output("sinfo", "-h", "-o", "%t %D") == "idle 2", 60)
        yield tmp_path
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.3)


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
    _until(
        lambda: said.exists() and "start 1" not in said.read_text() and _state(job) == "PENDING", 60
    )
    # a job that starts in the second of its requeue is killed: "Job credential revoked"
    time.sleep(3.0)
    # Slurm may put it off for two minutes nevertheless
    _until(lambda: _at_once(job) in ("COMPLETED", "FAILED"), 300)
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


def test_a_job_is_looked_at_read_and_ended(slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (slurm / "stub.sh").write_text(_WAITS)
    (slurm / "small.yaml").write_text("model: {name: transformer}\ndata: {name: python-docs}\n")
    asked = ("small.yaml", "--nproc-per-node", "1", "distributed.device=cpu")
    assert main(["submit", "slurm", *asked, "--python", "bash stub.sh"]) == 0
    status, logs, cancel = (line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:])

    def told(command: list[str]) -> str:
        assert main(command) == 0
        return capsys.readouterr().out

    _until((slurm / "running").exists, 120)
    assert told(status).startswith("RUNNING\nmachines: n0\n")
    _until(lambda: told(logs) == "running\n", 60)
    told(cancel)
    _until(lambda: told(status).startswith("CANCELLED"), 120)
    _until(lambda: "told to end" in told(logs), 60)


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
