"""A real cluster of Ray on this machine: its head, and further machines as processes beside it.

    with ray_cluster(monkeypatch) as cluster:
        machine = cluster.add_machine(cpus=1)
        cluster.kill_machine(machine)

A machine is a raylet with all that it starts. The head has the job server and no cores, so that no
rank is there.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.ranks import REPOSITORY, free_port

PATIENCE = 600.0  # seconds for what takes a tenth of that on an idle machine


def require_ray() -> None:
    """Skip a module where Ray is not installed, and say so among the skips."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip(
            "NO TEST OF RAY RUNS: ray is not installed"
            " (pip install -c constraints.txt -e '.[ray]')",
            allow_module_level=True,
        )


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.5)


@dataclass
class RayCluster:
    """A cluster that runs."""

    folder: Path
    environment: dict[str, str]
    gcs_port: int
    server: str  # the job server's address
    machines: list[psutil.Popen] = field(default_factory=list)

    def start(self, name: str, *options: str) -> psutil.Popen:
        log = self.folder / f"{name}.log"
        number = len(self.machines)
        self.machines.append(self._started(log, *options))

        def is_up() -> bool:
            said = log.read_text()
            if self.machines[number].poll() is not None:
                # Ray gives it 30 s, which may not be enough on a busy machine.
                assert "timed out during startup" in said, said
                self.machines[number] = self._started(log, *options)
            return "Ray runtime started" in said

        wait_until(is_up, f"{name} of Ray")
        return self.machines[number]

    def _started(self, log: Path, *options: str) -> psutil.Popen:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        # a disk of its own: a new machine empties the folder that it finds
        command += ["--temp-dir", str(self.folder / f"m{free_port()}")]
        always = ["--disable-usage-stats", "--object-store-memory", "80000000"]
        with log.open("w") as output:
            return psutil.Popen(
                [*command, *options, *always],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,
            )

    def add_machine(self, *, cpus: int) -> psutil.Popen:
        return self.start(
            f"machine-{free_port()}",
            "--address",
            f"127.0.0.1:{self.gcs_port}",
            "--num-cpus",
            str(cpus),
            "--dashboard-agent-listen-port",
            str(free_port()),
        )

    def kill_machine(self, machine: psutil.Popen) -> None:
        """End all of its processes at once, as when it loses power."""
        self.machines.remove(machine)
        everything = [machine]
        with suppress(psutil.NoSuchProcess):  # it has ended by itself
            everything += machine.children(recursive=True)
        for process in everything:
            with suppress(psutil.NoSuchProcess):
                process.suspend()  # none sees another one die
        for process in everything:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        machine.wait()


@contextmanager
def short_folder() -> Iterator[Path]:
    """Yield a folder of Ray's own: the paths of its sockets must be short."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def ray_cluster(patch: pytest.MonkeyPatch, **variables: str) -> Iterator[RayCluster]:
    """Start the head; yield the cluster, to which `lockstep submit` and `jobs` of a test belong.

    All processes of the cluster have the `variables`.
    """
    with short_folder() as folder:
        yield from _cluster_in(folder, patch, variables)


def _cluster_in(
    folder: Path, patch: pytest.MonkeyPatch, variables: dict[str, str]
) -> Iterator[RayCluster]:
    gcs_port = free_port()
    server_port = free_port()
    own = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_TMPDIR": str(folder),
        "RAY_worker_niceness": "0",  # else ranks wait for all others on a busy machine
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{server_port}",
    }
    for name, value in own.items():
        patch.setenv(name, value)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **variables}
    cluster = RayCluster(folder, environment, gcs_port, own["RAY_API_SERVER_ADDRESS"])
    try:
        cluster.start(
            "head",
            "--head",
            "--node-ip-address",
            "127.0.0.1",
            "--port",
            str(gcs_port),
            "--num-cpus",
            "0",
            "--dashboard-port",
            str(server_port),
            "--dashboard-agent-listen-port",
            str(free_port()),
            "--ray-client-server-port",
            str(free_port()),
        )
        yield cluster
    finally:
        for machine in reversed(list(cluster.machines)):
            cluster.kill_machine(machine)
