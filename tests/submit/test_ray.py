"""What `lockstep submit ray` would hand over, without a cluster."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli import main

_CONFIG = """
model: {name: transformer}
data: {name: python-docs}
distributed: {device: cpu, strategy: ddp}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "small.yaml").write_text(_CONFIG)
    return "code/small.yaml"


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["submit", "ray", *argv, "--dry-run"]) == 0
    tree: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return tree


def test_an_actor_for_each_machine(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    two = ("--nnodes", "2", "--nproc-per-node", "4")
    plan = shown(capsys, config, "training.max_steps=7", *two, "--gpus-per-node", "4")
    assert plan["placement group"] == {
        "bundles": [{"CPU": 4.0, "GPU": 4.0}] * 2,
        "strategy": "STRICT_SPREAD",
    }
    sent = plan["runtime_env"]["working_dir"]["config.yaml"]
    assert sent["training"]["max_steps"] == 7
    # Ray deletes the folder in which its processes start: no path of the run may lie in it
    first = (
        f"python -m lockstep train config.yaml --output-dir {tmp_path}/runs/small --nproc-per-node"
        " 4 --resume auto --nnodes 2"
    )
    assert plan["machines"] == [
        f"{first} --node-rank {number} --master-addr ADDRESS-OF-MACHINE-0 --master-port PORT"
        for number in (0, 1)
    ]
    *python, handed = shlex.split(plan["entrypoint"])
    assert python == ["python", "-m", "lockstep.submit.ray_driver"]
    assert json.loads(handed) == {
        "command": shlex.split(first),
        "nodes": 2,
        "bundle": {"CPU": 4.0, "GPU": 4.0},
        "max_losses": 3,
    }


def test_one_machine_a_bucket_and_a_folder_of_code(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--nproc-per-node", "2", "--cpus-per-node", "1", "--working-dir", "code")
    bucket = ("--output-dir", "s3://team/first", "--grace-seconds", "60")
    plan = shown(capsys, config, "training.seed=3", *options, *bucket, "--address", "http://h:1")
    assert plan["job server"] == "http://h:1"
    assert plan["runtime_env"] == {
        "working_dir": "code",
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"},
    }
    assert plan["placement group"] == {"bundles": [{"CPU": 1.0}], "strategy": "STRICT_PACK"}
    assert plan["machines"] == [
        "python -m lockstep train small.yaml training.seed=3 --output-dir s3://team/first"
        " --nproc-per-node 2 --resume auto"
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--working-dir", "elsewhere"), "code/small.yaml lies outside of elsewhere"),
        (("--cpus-per-node", "0"), "--cpus-per-node 0 is too low"),
        (("--max-losses", "-1"), "--max-losses -1 is too low"),
    ],
)
def test_what_cannot_be_is_refused(
    config: str, options: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", "ray", config, "--nproc-per-node", "1", *options]) == 2
    assert told in capsys.readouterr().err


def test_no_ray_here(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    for argv in (["submit", "ray", config, "--nproc-per-node", "1"], ["jobs", "status", "ray:x"]):
        assert main(argv) == 2
        assert "ray, which is not installed" in capsys.readouterr().err


def test_no_cluster_answers(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray", reason="NOT TESTED: ray is not installed")
    assert main(["jobs", "status", "ray:x", "--address", "http://127.0.0.1:9"]) == 2
    assert "Ray does not answer at http://127.0.0.1:9" in capsys.readouterr().err
