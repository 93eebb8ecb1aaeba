"""One run in a bucket, started by each launcher in turn, and killed under each."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lockstep import checkpoint
from lockstep.checkpoint import ObjectStorage
from lockstep.cli import main
from lockstep.files.object_client import ObjectClient
from tests import bucket, ray_cluster
from tests.bucket import Proxy
from tests.ranks import REPOSITORY
from tests.ray_cluster import wait_until
from tests.run_directory.test_run_mirror import CONFIG, rows
from tests.slurm_cluster import slurm_cluster

bucket.require_servers()
ray_cluster.require_ray()
pytestmark = [pytest.mark.full, pytest.mark.root, pytest.mark.timeout(3600)]
_ENDLESS = "training.max_steps=1000000"


class Run:
    """A run on two ranks that goes on from wherever it is."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.reached: list[int] = []  # where each launcher was killed
        self._storage = ObjectStorage(url)
        self._folder = folder

    @property
    def saved(self) -> int:
        return max((checkpoint.step_of(name) or 0 for name in self._storage.names()), default=0)

    def options(self, *more: str) -> list[str]:
        return ["train.yaml", "--output-dir", self.url, *more]

    def goes_on(self) -> None:
        """Wait until it has saved twice since it was killed."""
        before = self.saved
        wait_until(lambda: self.saved >= before + 4, "two more checkpoints")

    def was_killed(self, launcher: str) -> None:
        self.reached.append(self.saved)
        print(f"{launcher} is killed after step {self.saved}", flush=True)

    def start(self, *command: str) -> psutil.Popen:
        return psutil.Popen(
            [sys.executable, "-m", *command],
            cwd=self._folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
        )


def kill(process: psutil.Popen) -> None:
    for one in [process, *process.children(recursive=True)]:
        one.kill()
    process.wait()


def _by_lockstep_train(run: Run) -> None:
    started = run.start("lockstep", "train", *run.options("--nproc-per-node", "2", _ENDLESS))
    run.goes_on()
    kill(started)
    run.was_killed("lockstep train")


def _by_torchrun(run: Run) -> None:
    launcher = ["torch.distributed.run", "--nproc-per-node", "2", "-m", "lockstep", "train"]
    started = run.start(*launcher, *run.options(_ENDLESS))
    run.goes_on()
    kill(started)
    run.was_killed("torchrun")


def _by_slurm(run: Run, folder: Path, patch: pytest.MonkeyPatch) -> None:
    with slurm_cluster(folder / "slurm", patch):
        patch.chdir(folder)
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        options = run.options("--python", sys.executable, "--nproc-per-node", "2", _ENDLESS)
        assert main(["submit", "slurm", *options]) == 0
        run.goes_on()
        for process in psutil.process_iter(["cmdline"]):
            if run.url in (process.info["cmdline"] or []):
                process.kill()
        run.was_killed("Slurm")


def _by_ray(run: Run, patch: pytest.MonkeyPatch) -> None:
    with ray_cluster.ray_cluster(patch) as cluster:
        machine = cluster.add_machine(cpus=2)
        options = run.options("--python", sys.executable, "--nproc-per-node", "2", _ENDLESS)
        assert main(["submit", "ray", *options]) == 0
        run.goes_on()
        cluster.kill_machine(machine)
        run.was_killed("Ray")


def test_a_run_is_handed_from_launcher_to_launcher(
    bucket_proxy: Proxy, bucket_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text(CONFIG)
    (tmp_path / "slurm").mkdir()
    run = Run(bucket_url, tmp_path)
    launchers: list[Callable[[], None]] = [
        lambda: _by_lockstep_train(run),
        lambda: _by_torchrun(run),
        lambda: _by_slurm(run, tmp_path, monkeypatch),
        lambda: _by_ray(run, monkeypatch),
    ]
    for launcher in launchers:
        launcher()
    steps = run.saved + 5
    until = ("--nproc-per-node", "2", f"training.max_steps={steps}")
    assert run.start("lockstep", "train", *run.options(*until)).wait() == 0
    recorded = [row["step"] for row in rows(bucket_url, "metrics.jsonl")]
    assert recorded == list(range(1, steps + 1))
    resumed = [e["step"] for e in rows(bucket_url, "events.jsonl") if e["kind"] == "resume"]
    assert resumed == run.reached
    straight = Run(f"{bucket_url}-straight", tmp_path)
    assert straight.start("lockstep", "train", *straight.options(*until)).wait() == 0
    digests = []
    for url in (run.url, straight.url):
        assert ObjectClient(url).exists(f"commits/step-{steps:08d}")
        digests.append(checkpoint.digest(ObjectStorage(url).path(f"step-{steps:08d}")))
    print(f"resumed after {resumed}, {steps} steps, digests {digests[0][:12]} {digests[1][:12]}")
    assert digests[0] == digests[1]
