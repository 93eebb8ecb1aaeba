"""The objects of Kubernetes that start a launcher for each machine of a run.

A plain indexed Job, a JobSet, or a TrainJob of Kubeflow's Trainer, each with the config in a
ConfigMap; with `--queue` Kueue decides when it starts. None of them was run by a test: there is no
cluster where the tests run. Tests hold them against the published schemas.

Sources: kubernetes.io/docs/concepts/workloads/controllers/job (indexed Jobs, pod failures);
jobset.sigs.k8s.io/docs (names of pods, failure policy); www.kubeflow.org/docs/components/trainer
(the variables PET_* of its torch runtimes, runtimePatches); kueue.sigs.k8s.io/docs/tasks/run (the
label of a queue).

Tests: tests/submit/test_kubernetes.py
"""

import argparse
import shlex
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import EXIT_PREEMPTED, EXIT_USAGE, UsageError
from lockstep.machine.network import DEFAULT_PORT
from lockstep.submit.submission import PlainDumper, Submission

# What `kubectl` calls the kinds of job.
KINDS = {"job": "job", "jobset": "jobset.jobset.x-k8s.io", "trainjob": "trainjob"}
_CONFIG_FOLDER = "/etc/lockstep"
_RETRIES = 3  # of each pod; preemptions are not counted
_QUEUE = "kueue.x-k8s.io/queue-name"
_GROUP = "node"  # what Kubeflow's runtimes call the trainer's pods and their container
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_ENDPOINT_URL",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
)

Spec = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only Kubernetes has."""
    add = parser.add_argument
    add(
        "--kind",
        choices=tuple(KINDS),
        default="job",
        help="job: a plain indexed Job; jobset; trainjob: of Kubeflow Trainer 2 (default: job)",
    )
    add("--image", help="an image with Python, torch and Lockstep")
    add("--namespace", help="default: kubectl's own")
    add("--queue", metavar="NAME", help="a queue of Kueue, which starts the job when there is room")
    add(
        "--claim",
        metavar="NAME",
        help="a volume claim that all pods mount; the run directory is on it",
    )
    add(
        "--mount-path",
        metavar="DIR",
        type=Path,
        default=Path("/data"),
        help="where the claim is mounted (default: /data)",
    )
    add("--secret", metavar="NAME", help="a Secret whose keys become variables of the ranks")
    add(
        "--service-account",
        metavar="NAME",
        help="of the pods; clouds tie the rights in a bucket to it",
    )
    add(
        "--runtime",
        metavar="NAME",
        default="torch-distributed",
        help="the ClusterTrainingRuntime of a trainjob (default: torch-distributed)",
    )
    add(
        "--request",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="resources: cpu=8, memory=64Gi",
    )
    add(
        "--grace-seconds",
        metavar="N",
        type=int,
        default=120,
        help="time for ranks to save (default: 120)",
    )


def job_name(job: Submission, given: argparse.Namespace) -> str:
    """Return the job's name for `lockstep jobs`."""
    return f"kubernetes:{given.kind}/{job.name}"


def namespace_options(given: argparse.Namespace) -> tuple[str, ...]:
    """Return the options that name the namespace again."""
    return () if given.namespace is None else ("--namespace", given.namespace)


def manifests(job: Submission, given: argparse.Namespace, config_text: str) -> str:
    """Return all objects as YAML documents, in the order in which to create them.

    A ConfigMap holds the config.

    Raises UsageError: an option is missing or wrong.
    """
    _check(job, given)
    metadata: Spec = {"name": job.name}
    if given.namespace:
        metadata["namespace"] = given.namespace
    queued = metadata | ({"labels": {_QUEUE: given.queue}} if given.queue else {})
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {"config.yaml": config_text},
    }
    objects = [config, *_OBJECTS[given.kind](job, given, metadata, queued)]
    if given.queue:
        objects[-1]["spec"]["suspend"] = True  # Kueue ends that
    return "---\n".join(
        yaml.dump(one, Dumper=PlainDumper, sort_keys=False, width=110) for one in objects
    )


def _check(job: Submission, given: argparse.Namespace) -> None:
    if given.image is None:
        raise UsageError(
            "--image is missing",
            fix="--image REGISTRY/NAME:TAG, with Python, torch and Lockstep in it",
        )
    if given.claim is None and not job.is_in_bucket:
        raise UsageError(
            f"the run directory {job.output_dir} would go with its pod",
            where="--output-dir",
            why="a pod's own disk is deleted with it",
            fix="--claim NAME, a volume claim that all pods mount; or --output-dir"
            " s3://BUCKET/PREFIX",
        )
    for pair in given.request:
        if not all(pair.partition("=")):
            raise UsageError(
                f"--request {pair} is not NAME=VALUE", fix="--request cpu=8 --request memory=64Gi"
            )


def _plain_job(
    job: Submission, given: argparse.Namespace, metadata: Spec, queued: Spec
) -> list[Spec]:
    """Return an indexed Job, and the Service through which its pods find each other."""
    # Names must resolve before pods are ready: a pod is ready after the rendezvous.
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": job.name},
        "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
    }
    spec = _indexed_job(job, given, f"{job.name}-0.{job.name}")
    spec["template"]["spec"]["subdomain"] = job.name
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": queued, "spec": spec},
    ]


def _job_set(
    job: Submission, given: argparse.Namespace, _metadata: Spec, queued: Spec
) -> list[Spec]:
    """Return a JobSet of one indexed Job; it makes the Service by itself."""
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": job.name},
        "failurePolicy": {
            "maxRestarts": _RETRIES,
            # a retry does not repair a config
            "rules": [
                {
                    "name": "WrongConfig",
                    "action": "FailJobSet",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [
            {
                "name": _GROUP,
                "replicas": 1,
                "template": {
                    "spec": _indexed_job(job, given, f"{job.name}-{_GROUP}-0-0.{job.name}")
                },
            }
        ],
    }
    kind = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet"}
    return [{**kind, "metadata": queued, "spec": spec}]


def _train_job(
    job: Submission, given: argparse.Namespace, _metadata: Spec, queued: Spec
) -> list[Spec]:
    """Return a TrainJob; its runtime says through variables where the machines meet."""
    words = [shlex.quote(word) for word in _command(job, given)]
    if job.nodes > 1:
        words += ["--node-rank", '"$PET_NODE_RANK"', "--master-addr", '"$PET_MASTER_ADDR"']
        words += ["--master-port", '"$PET_MASTER_PORT"']
    environment: list[Spec] = [
        {"name": name, "value": value} for name, value in job.environment.items()
    ]
    if given.secret:
        # a trainer has no `envFrom`
        environment += [
            {
                "name": name,
                "valueFrom": {
                    "secretKeyRef": {"name": given.secret, "key": name, "optional": True}
                },
            }
            for name in _CREDENTIALS
        ]
    trainer: Spec = {
        "image": given.image,
        "command": ["sh", "-c", "exec " + " ".join(words)],
        "env": environment,
        "numNodes": job.nodes,
        "numProcPerNode": job.processes,
        "resourcesPerNode": _resources(job, given),
    }
    mounts, volumes = _volumes(job, given)
    pod: Spec = {
        "terminationGracePeriodSeconds": given.grace_seconds,
        "volumes": volumes,
        "containers": [{"name": _GROUP, "volumeMounts": mounts}],
    }
    if given.service_account:
        pod["serviceAccountName"] = given.service_account
    replicated = {"name": _GROUP, "template": {"spec": {"template": {"spec": pod}}}}
    patch = {
        "manager": "lockstep.submit/kubernetes",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [replicated]}}},
    }
    spec = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "ClusterTrainingRuntime",
            "name": given.runtime,
        },
        "trainer": trainer,
        "runtimePatches": [patch],
    }
    kind = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob"}
    return [{**kind, "metadata": queued, "spec": spec}]


_OBJECTS = {"job": _plain_job, "jobset": _job_set, "trainjob": _train_job}


def _command(job: Submission, given: argparse.Namespace) -> list[str]:
    folder = job.output_dir
    if given.claim and not job.is_in_bucket:
        folder = str(Path(given.mount_path, folder))
    return job.command(f"{_CONFIG_FOLDER}/config.yaml", folder)


def _resources(job: Submission, given: argparse.Namespace) -> Spec:
    requests = dict(pair.partition("=")[::2] for pair in given.request)
    limits = {"nvidia.com/gpu": job.gpus} if job.gpus else {}
    return {name: value for name, value in (("requests", requests), ("limits", limits)) if value}


def _volumes(job: Submission, given: argparse.Namespace) -> tuple[list[Spec], list[Spec]]:
    """Return the mounts of the container, and the volumes of the pod."""
    mounts: list[Spec] = [
        {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[Spec] = [
        {"name": "config", "configMap": {"name": job.name}},
        # 64 MB is too little for workers and NCCL
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    if given.claim:
        mounts.append({"name": "data", "mountPath": str(given.mount_path)})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": given.claim}})
    return mounts, volumes


def _indexed_job(job: Submission, given: argparse.Namespace, first: str) -> Spec:
    """Return the spec of an indexed Job: one pod a machine, each with its number.

    The pods meet at the name `first`.
    """
    words = [shlex.quote(word) for word in _command(job, given)]
    if job.nodes > 1:  # the shell expands the variable
        words += ["--node-rank", '"$JOB_COMPLETION_INDEX"', "--master-addr", first]
        words += ["--master-port", str(DEFAULT_PORT)]
    mounts, volumes = _volumes(job, given)
    container: Spec = {
        "name": "lockstep",
        "image": given.image,
        # `exec` lets signals reach the launcher
        "command": ["sh", "-c", "exec " + " ".join(words)],
        "env": [{"name": name, "value": value} for name, value in job.environment.items()],
        "resources": _resources(job, given),
        "volumeMounts": mounts,
    }
    if given.secret:
        container["envFrom"] = [{"secretRef": {"name": given.secret}}]
    on_exit = {"containerName": "lockstep", "operator": "In"}
    rules = [
        # saved: restart it
        {"action": "Ignore", "onExitCodes": on_exit | {"values": [EXIT_PREEMPTED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # a retry does not repair a config
        {"action": "FailJob", "onExitCodes": on_exit | {"values": [EXIT_USAGE]}},
    ]
    pod: Spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": given.grace_seconds,
        "containers": [container],
        "volumes": volumes,
    }
    if given.service_account:
        pod["serviceAccountName"] = given.service_account
    return {
        "completions": job.nodes,
        "parallelism": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": _RETRIES * job.nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }
