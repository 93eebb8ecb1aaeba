"""The manifests: parsed as YAML, and their parts held against one another."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli import main
from lockstep.config import load_config

_CONFIG = """
model: {name: transformer}
data: {name: python-docs}
distributed: {strategy: ddp, env: {NCCL_DEBUG: WARN}}
"""
Objects = dict[str, dict[str, Any]]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Small_Run.yaml").write_text(_CONFIG)
    return "Small_Run.yaml"


def rendered(capsys: pytest.CaptureFixture[str], *argv: str) -> Objects:
    assert main(["submit", "kubernetes", *argv, "--dry-run"]) == 0
    return {one["kind"]: one for one in yaml.safe_load_all(capsys.readouterr().out)}


def command(container: dict[str, Any]) -> str:
    shell, flag, text = container["command"]
    assert (shell, flag) == ("sh", "-c")
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0
    return str(text)


def test_an_indexed_job_with_a_headless_service(
    config: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    objects = rendered(
        capsys,
        config,
        "training.max_steps=10",
        "--nnodes",
        "3",
        "--nproc-per-node",
        "4",
        "--image",
        "me/x:1",
        "--claim",
        "runs",
        "--namespace",
        "team",
        "--request",
        "cpu=8",
        "--request",
        "memory=64Gi",
    )
    assert list(objects) == ["ConfigMap", "Service", "Job"]
    assert {one["metadata"]["name"] for one in objects.values()} == {"small-run"}
    assert {one["metadata"]["namespace"] for one in objects.values()} == {"team"}
    job = objects["Job"]["spec"]
    service = objects["Service"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True
    pod = job["template"]["spec"]
    assert pod["subdomain"] == objects["Service"]["metadata"]["name"], (
        "pods' names resolve through the service"
    )
    assert service["selector"] == {"job-name": objects["Job"]["metadata"]["name"]}
    (container,) = pod["containers"]
    text = command(container)
    assert (
        '--nnodes 3 --node-rank "$JOB_COMPLETION_INDEX" --master-addr small-run-0.small-run' in text
    )
    assert f"--master-port {service['ports'][0]['port']}" in text
    assert "--output-dir /data/runs/Small_Run --nproc-per-node 4 --resume auto" in text
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "64Gi"},
        "limits": {"nvidia.com/gpu": 4},
    }
    assert {"name": "NCCL_DEBUG", "value": "WARN"} in container["env"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    (tmp_path / "again.yaml").write_text(objects["ConfigMap"]["data"]["config.yaml"])
    again = load_config(tmp_path / "again.yaml")
    first = load_config(tmp_path / config, ["training.max_steps=10"])
    assert again == first, "the config travels whole, overrides and all"


def test_preemption_is_no_failure_and_a_wrong_config_is_not_retried(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = rendered(
        capsys, config, "--nproc-per-node", "1", "--image", "x", "distributed.device=cpu"
    )["Job"]["spec"]
    rules = {
        tuple(rule["onExitCodes"]["values"]): rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert rules == {(75,): "Ignore", (2,): "FailJob"}
    assert job["template"]["spec"]["restartPolicy"] == "Never", (
        "a policy of pod failures asks for it"
    )
    assert job["template"]["spec"]["terminationGracePeriodSeconds"] == 120
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"] == {}
    assert "--nnodes" not in command(container)


def test_an_image_is_asked_for(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "kubernetes", config, "--nproc-per-node", "1", "--dry-run"]) == 2
    assert "--image is missing" in capsys.readouterr().err


def test_the_published_schema_accepts_them(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of Kubernetes itself; the package holds its JSON schemas."""
    validator = pytest.importorskip(
        "kubernetes_validate", reason="NOT TESTED: needs `pip install kubernetes-validate`"
    )
    objects = rendered(
        capsys, config, "--nnodes", "2", "--nproc-per-node", "8", "--image", "x", "--claim", "runs"
    )
    for one in objects.values():
        validator.validate(one, "1.31", strict=True)
