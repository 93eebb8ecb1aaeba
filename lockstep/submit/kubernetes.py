"""Renders a run as Kubernetes manifests: an indexed Job with a headless Service.

Source: kubernetes.io/docs/concepts/workloads/controllers/job (indexed Jobs, pod failure policy).
"""

import argparse
import shlex
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import EXIT_PREEMPTED, EXIT_USAGE, UsageError
from lockstep.network import DEFAULT_PORT
from lockstep.submit import Submission, run_scheduler

_CONFIG_FOLDER = "/etc/lockstep"
_RETRIES = 3  # of each pod; preemptions are not counted


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only Kubernetes has."""
    add = parser.add_argument
    add("--image", help="an image with Python, torch and Lockstep")
    add("--namespace", help="default: kubectl's own")
    add("--claim", metavar="NAME", help="a volume claim that all pods mount; the run directory is on it")
    add("--mount-path", metavar="DIR", default="/data", help="where the claim is mounted (default: /data)")
    add("--request", metavar="NAME=VALUE", action="append", default=[], help="resources: cpu=8, memory=64Gi")
    add("--grace-seconds", metavar="N", type=int, default=120, help="time for ranks to save (default: 120)")


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def manifests(job: Submission, given: argparse.Namespace, config_text: str) -> str:
    """Return all objects as YAML documents, in the order in which to create them; a ConfigMap holds the config.

    Raises UsageError: an option is missing or wrong.
    """
    if given.image is None:
        raise UsageError("--image is missing", fix="--image REGISTRY/NAME:TAG, with Python, torch and Lockstep in it")
    for pair in given.request:
        if not all(pair.partition("=")):
            raise UsageError(f"--request {pair} is not NAME=VALUE", fix="--request cpu=8 --request memory=64Gi")
    metadata = {"name": job.name} | ({"namespace": given.namespace} if given.namespace else {})
    # Names must resolve before pods are ready: a pod is ready after the rendezvous.
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": job.name},
               "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}]}  # fmt: skip
    objects: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"config.yaml": config_text}},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": _indexed_job(job, given)},
    ]
    return "---\n".join(yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=110) for one in objects)


def submit(text: str) -> str:
    """Create the objects with kubectl, and return its output."""
    return run_scheduler(["kubectl", "apply", "-f", "-"], text, "the manifests")


def _indexed_job(job: Submission, given: argparse.Namespace) -> dict[str, Any]:
    folder = str(Path(given.mount_path, job.output_dir) if given.claim else job.output_dir)
    words = [shlex.quote(word) for word in job.command(f"{_CONFIG_FOLDER}/config.yaml", folder)]
    if job.nodes > 1:  # the shell expands the variable
        words += ["--node-rank", '"$JOB_COMPLETION_INDEX"', "--master-addr", f"{job.name}-0.{job.name}",
                  "--master-port", str(DEFAULT_PORT)]  # fmt: skip
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": job.name}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},  # 64 MB is too little for workers and NCCL
    ]
    if given.claim:
        mounts.append({"name": "data", "mountPath": given.mount_path})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": given.claim}})
    requests = dict(pair.partition("=")[::2] for pair in given.request)
    limits = {"nvidia.com/gpu": job.gpus} if job.gpus else {}
    container = {
        "name": "lockstep",
        "image": given.image,
        "command": ["sh", "-c", "exec " + " ".join(words)],  # `exec` lets signals reach the launcher
        "env": [{"name": name, "value": value} for name, value in job.environment.items()],
        "resources": {name: value for name, value in (("requests", requests), ("limits", limits)) if value},
        "volumeMounts": mounts,
    }
    on_exit = {"containerName": "lockstep", "operator": "In"}
    rules = [
        {"action": "Ignore", "onExitCodes": on_exit | {"values": [EXIT_PREEMPTED]}},  # saved: restart it
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": on_exit | {"values": [EXIT_USAGE]}},  # a retry does not repair a config
    ]
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": given.grace_seconds,
        "containers": [container],
        "volumes": volumes,
    }
    return {
        "completions": job.nodes,
        "parallelism": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": _RETRIES * job.nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }
