"""Adds the options of `lockstep submit`, and runs it."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import UsageError
from lockstep.submit import Submission, kubernetes, slurm

if TYPE_CHECKING:
    from lockstep.config import Config

SCHEDULERS = ("slurm", "kubernetes")


def add_options(parser: argparse.ArgumentParser, scheduler: str) -> None:
    """Add the options that only submit has, for one scheduler."""
    add = parser.add_argument
    add("--dry-run", action="store_true", help="print the job, and submit nothing")
    add("--gpus-per-node", metavar="N", type=int, help="GPUs per machine (default: as ranks; 0 where device is cpu)")
    add("--python", metavar="COMMAND", default="python", help="the command that runs Python there (default: python)")
    if scheduler == "slurm":
        add("--time", metavar="HH:MM:SS", help="the time limit")
        for name in ("partition", "account", "qos", "cpus-per-task", "mem", "constraint"):
            add(f"--{name}", help=f"as sbatch's --{name}")
        add("--signal-seconds", metavar="N", type=int, default=120, help="save N s before the limit (default: 120)")
        add("--container", metavar="IMAGE", help="by pyxis; a .sif file by apptainer")
        add("--mount", metavar="HOST:CONTAINER", action="append", default=[], help="a folder for the container")
        add("--setup", metavar="LINE", action="append", default=[], help="a shell line before the start: module load …")
        add("--sbatch", metavar="LINE", action="append", default=[], help="a further #SBATCH line: --exclusive")
        return
    add("--image", help="an image with Python, torch and Lockstep")
    add("--namespace", help="default: kubectl's own")
    add("--claim", metavar="NAME", help="a volume claim that all pods mount; the run directory is on it")
    add("--mount-path", metavar="DIR", default="/data", help="where the claim is mounted (default: /data)")
    add("--request", metavar="NAME=VALUE", action="append", default=[], help="resources: cpu=8, memory=64Gi")
    add("--grace-seconds", metavar="N", type=int, default=120, help="time for ranks to save (default: 120)")
    add("--trainjob", action="store_true", help="a TrainJob of Kubeflow Trainer instead of a Job")
    add("--runtime", default="torch-distributed", help="the TrainJob's runtime (default: torch-distributed)")


def run(scheduler: str, given: argparse.Namespace, path: Path, overrides: Sequence[str], options: Any) -> str:
    """Render the job and, unless --dry-run is given, submit it; return the text to print."""
    from lockstep.config import load_config

    config = load_config(path, overrides)  # reject a wrong config here, not in the queue
    job = _job(given, path, overrides, options, config)
    if scheduler == "slurm":
        wanted = _slurm(given)
        return slurm.script(job, wanted) if given.dry_run else slurm.submit(job, wanted)
    where, resolved = _kubernetes(given), config.to_yaml()
    job = replace(job, overrides=())  # the resolved config contains them
    if given.dry_run:
        return kubernetes.text(kubernetes.manifests(job, where, resolved))
    return kubernetes.submit(job, where, resolved)


def _job(given: argparse.Namespace, path: Path, overrides: Sequence[str], options: Any, config: "Config") -> Submission:
    fewest, most = options.nodes
    if fewest != most:
        raise UsageError(
            f"--nnodes {options.nnodes}: a job has a fixed number of machines", where="--nnodes", fix="write one number"
        )
    gpus = given.gpus_per_node
    processes = options.processes or gpus
    if not processes or processes < 0:
        raise UsageError(
            "the number of ranks per machine is missing",
            fix="--nproc-per-node N, or --gpus-per-node N: the job runs elsewhere",
        )
    if gpus is None:
        gpus = 0 if config.distributed.device == "cpu" else processes
    return Submission(
        config=path,
        output_dir=given.output_dir or Path("runs", path.stem),
        overrides=tuple(overrides),
        nodes=most,
        processes=processes,
        gpus=gpus,
        environment=dict(config.distributed.env),
        python=given.python,
        max_restarts=options.max_restarts,
    )


def _slurm(given: argparse.Namespace) -> slurm.SlurmOptions:
    names = ("time", "partition", "account", "qos", "cpus_per_task", "mem", "constraint")
    chosen = {name.replace("_", "-"): getattr(given, name) for name in names}
    return slurm.SlurmOptions(
        options={name: value for name, value in chosen.items() if value is not None},
        extra=tuple(given.sbatch),
        setup=tuple(given.setup),
        container=given.container,
        mounts=tuple(given.mount),
        signal_seconds=given.signal_seconds,
    )


def _kubernetes(given: argparse.Namespace) -> kubernetes.KubernetesOptions:
    if given.image is None:
        raise UsageError("--image is missing", fix="--image REGISTRY/NAME:TAG, with Python, torch and Lockstep in it")
    for pair in given.request:
        if not all(pair.partition("=")):
            raise UsageError(f"--request {pair} is not NAME=VALUE", fix="--request cpu=8 --request memory=64Gi")
    requests = dict(pair.partition("=")[::2] for pair in given.request)
    return kubernetes.KubernetesOptions(
        given.image, given.namespace, given.claim, given.mount_path, given.trainjob, given.runtime, requests,
        given.grace_seconds,
    )  # fmt: skip
