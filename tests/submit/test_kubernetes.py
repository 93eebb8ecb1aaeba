"""The manifests: parsed as YAML, and their parts held against one another."""

import importlib
import json
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
    asked = ("--nproc-per-node", "1", "--image", "x", "--claim", "runs", "distributed.device=cpu")
    job = rendered(capsys, config, *asked)["Job"]["spec"]
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


def test_a_run_directory_that_would_go_with_its_pod_is_refused(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["submit", "kubernetes", config, "--nproc-per-node", "1", "--image", "x", "--dry-run"]
    assert main(argv) == 2
    assert "would go with its pod" in capsys.readouterr().err
    objects = rendered(capsys, *argv[2:-1], *_BUCKET)
    (container,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
    assert "--output-dir s3://team/runs/first" in command(container)
    assert objects["Job"]["metadata"]["name"] == "first"


_BUCKET = ("--output-dir", "s3://team/runs/first")
_ALL = ("--nnodes", "2", "--nproc-per-node", "8", "--image", "x", "--claim", "runs", "--queue", "q")
_ALL += ("--secret", "keys", "--service-account", "trainer", "--request", "cpu=8")


def test_the_published_schema_accepts_them(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of Kubernetes itself; the package holds its JSON schemas."""
    validator = pytest.importorskip(
        "kubernetes_validate", reason="NOT TESTED: needs `pip install kubernetes-validate`"
    )
    for one in rendered(capsys, config, *_ALL).values():
        validator.validate(one, "1.31", strict=True)


@pytest.mark.parametrize(
    ("kind", "module", "model"),
    [
        ("job", "io_k8s_api_batch_v1_job", "IoK8sApiBatchV1Job"),
        ("jobset", "jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
        ("trainjob", "trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
    ],
)
def test_the_schema_of_each_kind_knows_all_that_it_holds(
    config: str, capsys: pytest.CaptureFixture[str], kind: str, module: str, model: str
) -> None:
    """Kubeflow publishes models of its own objects and of JobSet's; an unknown name is dropped."""
    api = "kubeflow_trainer_api"
    pytest.importorskip(api, reason="NOT TESTED: needs `pip install kubeflow-trainer-api`")
    schema = getattr(importlib.import_module(f"{api}.models.{module}"), model)
    one = list(rendered(capsys, config, "--kind", kind, *_ALL).values())[-1]
    assert json.loads(schema.from_dict(one).to_json()) == one
    wrong = {**one, "spec": {**one["spec"], "suspended": True}}
    assert json.loads(schema.from_dict(wrong).to_json()) != wrong


def test_a_job_set_waits_in_a_queue_and_its_pods_meet_at_the_first(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    objects = rendered(capsys, config, "--kind", "jobset", *_ALL)
    assert list(objects) == ["ConfigMap", "JobSet"], "a JobSet makes its Service by itself"
    one = objects["JobSet"]
    assert one["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "q"}
    assert one["spec"]["suspend"] is True
    assert one["spec"]["network"] == {"enableDNSHostnames": True, "subdomain": "small-run"}
    (group,) = one["spec"]["replicatedJobs"]
    (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
    # JobSet names pods SET-GROUP-JOB-POD.SUBDOMAIN
    assert f"--master-addr small-run-{group['name']}-0-0.small-run " in command(container)
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert one["spec"]["failurePolicy"]["rules"][0]["action"] == "FailJobSet"


def test_a_train_job_reads_the_variables_of_its_runtime(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = rendered(capsys, config, "--kind", "trainjob", *_ALL)["TrainJob"]["spec"]
    assert spec["runtimeRef"]["name"] == "torch-distributed"
    trainer = spec["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8}
    meeting = '--node-rank "$PET_NODE_RANK" --master-addr "$PET_MASTER_ADDR"'
    assert f'{meeting} --master-port "$PET_MASTER_PORT"' in command(trainer)
    # Kubeflow sets these itself, and refuses them of a user
    assert not [one for one in trainer["env"] if one["name"].startswith("PET_")]
    keys = [one for one in trainer["env"] if "valueFrom" in one]
    assert all(one["valueFrom"]["secretKeyRef"]["optional"] for one in keys)
    assert "AWS_SECRET_ACCESS_KEY" in {one["name"] for one in keys}
    (patch,) = spec["runtimePatches"]
    (group,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = group["template"]["spec"]["template"]["spec"]
    assert (pod["terminationGracePeriodSeconds"], pod["serviceAccountName"]) == (120, "trainer")
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
