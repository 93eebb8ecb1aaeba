"""A real Slurm on this machine: munge, slurmctld and two slurmd, for one test alone.

Debian has them: apt-get install slurmctld slurmd slurm-client munge. Needs root, as slurmd does.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.ranks import free_port

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


@contextmanager
def slurm_cluster(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Start Slurm in a folder, which becomes the working directory; skip where there is none."""
    missing = [
        tool for tool in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(tool) is None
    ]
    if os.geteuid() != 0 or missing:
        pytest.skip(
            "NOT TESTED: needs root and a Slurm on this machine (missing:"
            f" {', '.join(missing) or 'root'})"
        )
    for name in ("state", "spool-n0", "spool-n1"):
        (folder / name).mkdir()
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    ports = [free_port() for _ in range(3)]
    conf.write_text(
        _CONF.format(host=socket.gethostname().split(".")[0], folder=folder, ports=ports)
    )
    patch.setenv("SLURM_CONF", str(conf))
    patch.chdir(folder)
    munged = [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={key}",
        f"--socket={folder}/munge.socket",
        f"--pid-file={folder}/munge.pid",
        f"--log-file={folder}/munge.log",
        f"--seed-file={folder}/seed",
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
                folder / f"{'-'.join(command[:1] + command[-1:])}.out".replace("/", "_")[-60:]
            ).open("w")
            running.append(subprocess.Popen(command, stdout=log, stderr=log))
            time.sleep(0.5)
        until(lambda: output("sinfo", "-h", "-o", "%t %D") == "idle 2", 60)
        yield folder
    finally:
        for process in reversed(running):
            process.terminate()
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
        end_steps(conf)


def end_steps(conf: Path) -> None:
    """End the steps of killed jobs: they are no children of slurmd, and wait for it without end."""
    for process in psutil.process_iter():
        with suppress(psutil.AccessDenied, psutil.NoSuchProcess):
            if process.name() == "slurmstepd" and process.environ().get("SLURM_CONF") == str(conf):
                process.kill()
                process.wait(10)


def output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.3)
