"""Renders a run as Kubernetes manifests: an indexed Job with a headless Service, or a TrainJob of Kubeflow Trainer.

Source: kubernetes.io/docs/concepts/workloads/controllers/job (indexed Jobs, pod failure policy),
kubeflow.org/docs/components/trainer (TrainJob, runtime `torch-distributed`).
"""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import EXIT_PREEMPTED, EXIT_USAGE, UsageError
from lockstep.network import DEFAULT_PORT
from lockstep.submit import Submission, run_scheduler

_CONFIG_FOLDER = "/etc/lockstep"


@dataclass(frozen=True)
class KubernetesOptions:
    """Options that only Kubernetes has."""

    image: str  # an image with Python, torch and Lockstep in it
    namespace: str | None = None  # unset: kubectl's current one
    claim: str | None = None  # a PersistentVolumeClaim that all pods mount (ReadWriteMany); the run directory is on it
    mount: str = "/data"  # where the claim is mounted
    trainjob: bool = False  # make a Kubeflow TrainJob instead of a Job
    runtime: str = "torch-distributed"  # the TrainJob's runtime
    requests: dict[str, str] = field(default_factory=dict)  # resources besides GPUs: cpu, memory
    grace_seconds: int = 120  # how long ranks may take to save when the pod is terminated
    retries: int = 3  # retries of the job; preemptions are not counted


def manifests(job: Submission, where: KubernetesOptions, config_text: str) -> list[dict[str, Any]]:
    """Return all objects, in the order in which to create them.

    Args:
        config_text: the resolved config; it is stored in a ConfigMap.
    """
    if where.trainjob:
        return [_train_job(job, where, config_text)]
    config = _object("v1", "ConfigMap", job.name, where, data={"config.yaml": config_text})
    selector = {"job-name": job.name}
    service = _object(
        "v1", "Service", job.name, where,
        # Names must resolve before pods are ready: a pod is ready after the rendezvous.
        spec={"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector,
              "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}]},
    )  # fmt: skip
    return [config, service, _indexed_job(job, where)]


def text(objects: list[dict[str, Any]]) -> str:
    """Return the objects as YAML documents."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def block(dumper: yaml.SafeDumper, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, block)
    return "---\n".join(yaml.dump(one, Dumper=Dumper, sort_keys=False, width=110) for one in objects)


def submit(job: Submission, where: KubernetesOptions, config_text: str) -> str:
    """Create the objects with kubectl, and return its output."""
    return run_scheduler(["kubectl", "apply", "-f", "-"], text(manifests(job, where, config_text)), "the manifests")


def _object(version: str, kind: str, name: str, where: KubernetesOptions, **rest: Any) -> dict[str, Any]:
    metadata = {"name": name} | ({"namespace": where.namespace} if where.namespace else {})
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **rest}


def _command(job: Submission, where: KubernetesOptions, config: str, *rendezvous: str) -> str:
    """Return the shell command of a pod: the shell expands variables; `exec` lets signals reach the launcher."""
    folder = str(Path(where.mount, job.output_dir) if where.claim else job.output_dir)
    words = [shlex.quote(word) for word in job.command(config, folder)]
    return "exec " + " ".join([*words, *(rendezvous if job.nodes > 1 else ())])


def _indexed_job(job: Submission, where: KubernetesOptions) -> dict[str, Any]:
    rendezvous = ("--node-rank", '"$JOB_COMPLETION_INDEX"', "--master-addr", f"{job.name}-0.{job.name}",
                  "--master-port", str(DEFAULT_PORT))  # fmt: skip
    container = {
        "name": "lockstep",
        "image": where.image,
        "command": ["sh", "-c", _command(job, where, f"{_CONFIG_FOLDER}/config.yaml", *rendezvous)],
        "env": _environment(job),
        "resources": _resources(job, where),
        "volumeMounts": _mounts(where),
    }
    on_exit = {"containerName": "lockstep", "operator": "In"}
    rules = [
        {"action": "Ignore", "onExitCodes": on_exit | {"values": [EXIT_PREEMPTED]}},  # saved: restart it
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": on_exit | {"values": [EXIT_USAGE]}},  # a retry does not repair a config
    ]
    spec = {
        "completions": job.nodes,
        "parallelism": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": where.retries * job.nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {
            "spec": {
                "subdomain": job.name,
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": where.grace_seconds,
                "containers": [container],
                "volumes": _volumes(job, where),
            }
        },
    }
    return _object("batch/v1", "Job", job.name, where, spec=spec)


def _train_job(job: Submission, where: KubernetesOptions, config_text: str) -> dict[str, Any]:
    """Return a TrainJob; the runtime's torch plug-in gives a pod its number in PET_* variables, as torchrun reads them.

    The runtime provides the volumes, because the field to add some has had three names. A variable carries the config.
    """
    if where.claim:
        raise UsageError(
            "a TrainJob takes its volumes from its runtime", where="--claim", fix="mount it in the runtime, and name"
            " the folder with --output-dir; or leave out --trainjob",
        )  # fmt: skip
    rendezvous = ("--node-rank", '"$PET_NODE_RANK"', "--master-addr", '"$PET_MASTER_ADDR"', "--master-port",
                  '"$PET_MASTER_PORT"')  # fmt: skip
    config = "/tmp/lockstep.yaml"
    trainer = {
        "image": where.image,
        "command": [
            "sh",
            "-c",
            f'printf %s "$LOCKSTEP_CONFIG" > {config} && {_command(job, where, config, *rendezvous)}',
        ],
        "numNodes": job.nodes,
        "numProcPerNode": job.processes,
        "env": [*_environment(job), {"name": "LOCKSTEP_CONFIG", "value": config_text}],
        "resourcesPerNode": _resources(job, where),
    }
    spec = {"runtimeRef": {"name": where.runtime}, "trainer": trainer}
    return _object("trainer.kubeflow.org/v1alpha1", "TrainJob", job.name, where, spec=spec)


def _environment(job: Submission) -> list[dict[str, str]]:
    return [{"name": name, "value": value} for name, value in job.environment.items()]


def _resources(job: Submission, where: KubernetesOptions) -> dict[str, Any]:
    limits = {"nvidia.com/gpu": job.gpus} if job.gpus else {}
    return {name: value for name, value in (("requests", dict(where.requests)), ("limits", limits)) if value}


def _mounts(where: KubernetesOptions) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    return mounts + ([{"name": "data", "mountPath": where.mount}] if where.claim else [])


def _volumes(job: Submission, where: KubernetesOptions) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": job.name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # 64 MB is too little for workers and NCCL
    ]
    return volumes + ([{"name": "data", "persistentVolumeClaim": {"claimName": where.claim}}] if where.claim else [])
