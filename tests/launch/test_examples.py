"""The wrappers of examples/launch: a few lines each, and they train."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.diagnose.test_doctor import TINY
from tests.launch.shared import environment
from tests.ranks import REPOSITORY, free_port

SCRIPTS = Path(REPOSITORY, "examples", "launch")


def start(folder: Path, script: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
    (folder / "tiny.yaml").write_text(TINY)
    return subprocess.Popen(
        [str(SCRIPTS / script), *arguments],
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1", PYTHON=sys.executable, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "names",
    [("one", "torchrun"), ("first", "second")],
    ids=["each on one machine", "two machines"],
)
def test_each_trains(tmp_path: Path, names: tuple[str, ...]) -> None:
    port = str(free_port())
    by_names = (
        "--num_nodes",
        "2",
        "--node_rank",
        "1",
        "--num_gpus",
        "1",
        "--master_addr",
        "127.0.0.1",
    )
    by_names += ("--config", "tiny.yaml", "--output-dir", "runs/m")
    asked = {
        "one": ("train_distributed.sh", ("tiny.yaml", "--output-dir", "runs/one")),
        "torchrun": (
            "train_dist_torchrun.sh",
            ("--num_gpus", "1", "--config", "tiny.yaml", "--output-dir", "runs/t"),
        ),
        "first": (
            "train_multinode.sh",
            ("2", "0", "127.0.0.1", "tiny.yaml", "--output-dir", "runs/m"),
        ),
        "second": ("train_multinode.sh", by_names),
    }
    running = [
        start(tmp_path, asked[n][0], *asked[n][1], NPROC="1", MASTER_PORT=port) for n in names
    ]
    told = {
        name: process.communicate(timeout=300)[0]
        for name, process in zip(names, running, strict=True)
    }
    assert [process.returncode for process in running] == [0] * len(names), told
    runs = [("m", 2)] if "first" in names else [("one", 1), ("t", 1)]
    for run, ranks in runs:
        assert f"strategy ddp:{ranks}" in (tmp_path / f"runs/{run}/logs/rank-0.log").read_text()


@pytest.mark.parametrize("script", ["train_dist_torchrun.sh", "train_multinode.sh"])
def test_without_arguments_they_say_how(tmp_path: Path, script: str) -> None:
    process = start(tmp_path, script)
    said, _ = process.communicate(timeout=100)
    assert process.returncode == 2
    assert said.startswith("usage: ")


def test_they_are_a_few_lines_that_bash_understands() -> None:
    for script in SCRIPTS.glob("*.sh"):
        assert len(script.read_text().splitlines()) < 10
        assert os.access(script, os.X_OK)
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
