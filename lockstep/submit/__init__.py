"""Turns a run into a job of Slurm, Kubernetes or Ray, which starts one launcher per machine.

Nothing here loads torch.

Tests: tests/submit/test_slurm.py, tests/submit/test_kubernetes.py, tests/submit/test_real_slurm.py,
tests/submit/test_ray.py, tests/submit/test_across_launchers.py
"""

import argparse
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import RunError, UsageError
from lockstep.files.paths import bucket_url
from lockstep.submit import kubernetes, ray_job, slurm
from lockstep.submit.submission import Submission

if TYPE_CHECKING:
    from lockstep.config import Config

SCHEDULERS = ("slurm", "kubernetes", "ray")
_OPTIONS = {
    "slurm": slurm.add_options,
    "kubernetes": kubernetes.add_options,
    "ray": ray_job.add_options,
}


def add_options(parser: argparse.ArgumentParser, scheduler: str) -> None:
    """Add the options that only submit has, for one scheduler."""
    add = parser.add_argument
    add("--dry-run", action="store_true", help="print the job, and submit nothing")
    add(
        "--gpus-per-node",
        metavar="N",
        type=int,
        help="GPUs per machine (default: as ranks; 0 where device is cpu)",
    )
    add(
        "--python",
        metavar="COMMAND",
        default="python",
        help="the command that runs Python there (default: python)",
    )
    _OPTIONS[scheduler](parser)


def run(
    scheduler: str, given: argparse.Namespace, path: Path, overrides: Sequence[str], options: Any
) -> str:
    """Render the job and, unless --dry-run is given, submit it; return the text to print."""
    from lockstep.config import load_config

    config = load_config(path, overrides)  # reject a wrong config here, not in the queue
    job = _job(given, path, overrides, options, config)
    if scheduler == "slurm":
        text = slurm.batch_script(job, given)
        if given.dry_run:
            return text
        # Slurm writes its log there, but makes no folders
        job.folder.mkdir(parents=True, exist_ok=True)
        output = _run_scheduler(["sbatch"], text, "the batch script")
        # "Submitted batch job 4711", with "on cluster …" where there are several
        number = next((word for word in output.split() if word.isdigit()), "")
        return f"{output}\n{what_next(f'slurm:{number}')}"
    if scheduler == "ray":
        plan = ray_job.planned(job, given, config.to_yaml())
        if given.dry_run:
            return plan.shown(given.address)
        number = ray_job.submit(plan, given)
        return f"submitted\n{what_next(f'ray:{number}', *ray_job.address_options(given))}"
    # The resolved config contains the overrides.
    text = kubernetes.manifests(job.with_overrides(()), given, config.to_yaml())
    if given.dry_run:
        return text
    output = _run_scheduler(["kubectl", "apply", "-f", "-"], text, "the manifests")
    named = kubernetes.job_name(job, given)
    return f"{output}\n{what_next(named, *kubernetes.namespace_options(given))}"


def what_next(job: str, *options: str) -> str:
    """Return the commands for a job that was submitted."""
    rest = " ".join(["", *options])
    return "\n".join(f"lockstep jobs {what} {job}{rest}" for what in ("status", "logs", "cancel"))


def _job(
    given: argparse.Namespace, path: Path, overrides: Sequence[str], options: Any, config: "Config"
) -> Submission:
    """Return what the command line and the config say of a run and its machines.

    Raises UsageError: a number is missing or not fixed, or checkpoints would be elsewhere.
    """
    fewest, most = options.nodes
    if fewest != most:
        raise UsageError(
            f"--nnodes {options.nnodes}: a job has a fixed number of machines",
            where="--nnodes",
            fix="write one number",
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
    output_dir = given.output_dir or str(Path("runs", path.stem))
    url = bucket_url(output_dir, "--output-dir")
    if url is not None:
        config.kept_in(url)  # refuses checkpoints that are elsewhere
    return Submission(
        path,
        url or output_dir,
        tuple(overrides),
        most,
        processes,
        gpus,
        dict(config.distributed.env),
        given.python,
        options.max_restarts,
    )


def _run_scheduler(command: Sequence[str], text: str, what: str) -> str:
    """Run a scheduler's program with `text` as input, and return its output.

    Raises: it is missing, or failed.
    """
    if shutil.which(command[0]) is None:
        raise UsageError(
            f"{command[0]} is not on this machine",
            fix=f"--dry-run prints {what}; submit it where {command[0]} is",
        )
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(
            f"{command[0]} failed for {what}", why=done.stderr.strip(), fix="--dry-run prints it"
        )
    return done.stdout.strip()
