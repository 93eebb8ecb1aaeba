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
        slurm.add_options(parser)
    else:
        kubernetes.add_options(parser)


def run(scheduler: str, given: argparse.Namespace, path: Path, overrides: Sequence[str], options: Any) -> str:
    """Render the job and, unless --dry-run is given, submit it; return the text to print."""
    from lockstep.config import load_config

    config = load_config(path, overrides)  # reject a wrong config here, not in the queue
    job = _job(given, path, overrides, options, config)
    if scheduler == "slurm":
        return slurm.script(job, given) if given.dry_run else slurm.submit(job, given)
    # The resolved config contains the overrides.
    text = kubernetes.manifests(replace(job, overrides=()), given, config.to_yaml())
    return text if given.dry_run else kubernetes.submit(text)


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
        path, given.output_dir or Path("runs", path.stem), tuple(overrides), most, processes, gpus,
        dict(config.distributed.env), given.python, options.max_restarts,
    )  # fmt: skip
