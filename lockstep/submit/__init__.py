"""Turns a run into a job of Slurm or of Kubernetes, which starts one launcher per machine.

Nothing here loads torch.

Sources: slurm.schedmd.com/sbatch.html (options), slurm.schedmd.com/scontrol.html (requeue);
container options are those of pyxis (github.com/NVIDIA/pyxis);
kubernetes.io/docs/concepts/workloads/controllers/job (indexed Jobs, pod failures).

Tests: tests/submit/test_slurm.py, tests/submit/test_kubernetes.py, tests/submit/test_real_slurm.py
"""

import argparse
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lockstep.errors import EXIT_PREEMPTED, EXIT_USAGE, RunError, UsageError
from lockstep.network import DEFAULT_PORT

if TYPE_CHECKING:
    from lockstep.config import Config

SCHEDULERS = ("slurm", "kubernetes")
_SBATCH = ("time", "partition", "account", "qos", "cpus-per-task", "mem", "constraint")
_CONFIG_FOLDER = "/etc/lockstep"
_RETRIES = 3  # of each pod of Kubernetes; preemptions are not counted


@dataclass(frozen=True)
class Submission:
    """A run, and the machines that it needs."""

    config: Path  # the config file
    # the run directory; one folder that all machines share, unless `checkpoint.format` is `full`
    output_dir: Path
    overrides: tuple[str, ...] = ()  # KEY=VALUE, as on the command line
    nodes: int = 1  # number of machines
    processes: int = 1  # ranks per machine
    gpus: int = 0  # GPUs per machine; 0: the CPU
    # variables for every rank (`distributed.env`)
    environment: dict[str, str] = field(default_factory=dict)
    python: str = "python"  # the command that runs Python there
    max_restarts: int = 0  # as for `lockstep train`

    @property
    def name(self) -> str:
        """The run directory's name, in the characters that schedulers accept."""
        text = re.sub(r"[^a-z0-9]+", "-", self.output_dir.name.lower()).strip("-")
        return text[:40].rstrip("-") or "lockstep"

    def command(self, config: str, output_dir: str, *rendezvous: str) -> list[str]:
        """Return `python -m lockstep train …` for one machine.

        `rendezvous` are its options to find the others.
        """
        words = [*shlex.split(self.python), "-m", "lockstep", "train", config, *self.overrides]
        words += ["--output-dir", output_dir, "--nproc-per-node", str(self.processes)]
        words += ["--max-restarts", str(self.max_restarts)] if self.max_restarts else []
        return [
            *words,
            "--resume",
            "auto",
            *(("--nnodes", str(self.nodes), *rendezvous) if self.nodes > 1 else ()),
        ]


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
    if scheduler == "slurm":
        for name in _SBATCH:
            add(f"--{name}", help=f"as sbatch's --{name}")
        add(
            "--signal-seconds",
            metavar="N",
            type=int,
            default=120,
            help="save N s before the limit (default: 120)",
        )
        add("--container", metavar="IMAGE", help="by pyxis; a .sif file by apptainer")
        add(
            "--mount",
            metavar="HOST:CONTAINER",
            action="append",
            default=[],
            help="a folder for the container",
        )
        add(
            "--setup",
            metavar="LINE",
            action="append",
            default=[],
            help="a shell line before the start: module load …",
        )
        add(
            "--sbatch",
            metavar="LINE",
            action="append",
            default=[],
            help="a further #SBATCH line: --exclusive",
        )
    else:
        add("--image", help="an image with Python, torch and Lockstep")
        add("--namespace", help="default: kubectl's own")
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


def run(
    scheduler: str, given: argparse.Namespace, path: Path, overrides: Sequence[str], options: Any
) -> str:
    """Render the job and, unless --dry-run is given, submit it; return the text to print."""
    from lockstep.config import load_config

    config = load_config(path, overrides)  # reject a wrong config here, not in the queue
    job = _job(given, path, overrides, options, config)
    if scheduler == "slurm":
        text = batch_script(job, given)
        if given.dry_run:
            return text
        # Slurm writes its log there, but makes no folders
        job.output_dir.mkdir(parents=True, exist_ok=True)
        # its output has the job's number
        return _run_scheduler(["sbatch"], text, "the batch script")
    # The resolved config contains the overrides.
    text = manifests(replace(job, overrides=()), given, config.to_yaml())
    return (
        text
        if given.dry_run
        else _run_scheduler(["kubectl", "apply", "-f", "-"], text, "the manifests")
    )


def _job(
    given: argparse.Namespace, path: Path, overrides: Sequence[str], options: Any, config: "Config"
) -> Submission:
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
    return Submission(
        path,
        given.output_dir or Path("runs", path.stem),
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


def batch_script(job: Submission, given: argparse.Namespace) -> str:
    """Return the batch script. Raises UsageError: an option contains a line break."""
    import jinja2

    options = {name: getattr(given, name.replace("-", "_")) for name in _SBATCH}
    options = {name: value for name, value in options.items() if value is not None}
    for text in (*options.values(), *given.sbatch, str(job.output_dir)):
        if "\n" in text:
            raise UsageError(
                f"an option of sbatch is one line, not {text!r}",
                where="lockstep submit slurm",
                fix="give each option on its own",
            )
    environment = jinja2.Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["quote"] = shlex.quote
    template = environment.from_string(files("lockstep.submit").joinpath("slurm.sh.j2").read_text())
    words = [
        shlex.quote(word)
        for word in job.command(str(job.config), str(job.output_dir), "--rdzv-endpoint")
    ]
    if job.nodes > 1:
        words += ['"$head:$port"', "--rdzv-id", '"$SLURM_JOB_ID"']
    started, wrapper = _container(given)
    return template.render(
        job=job,
        options=options,
        extra=given.sbatch,
        setup=given.setup,
        signal_seconds=given.signal_seconds,
        log=f"{job.output_dir}/slurm-%j.out",
        container=started,
        command=" ".join([*map(shlex.quote, wrapper), *words]),
    )


def _container(given: argparse.Namespace) -> tuple[list[str], list[str]]:
    if given.container is None:
        return [], []
    if given.container.endswith(".sif"):
        binds = [word for mount in given.mount for word in ("--bind", mount)]
        return [], ["apptainer", "exec", "--nv", *binds, given.container]
    mounts = ",".join([f"{Path.cwd()}:{Path.cwd()}", *given.mount])
    return [
        f"--container-image={given.container}",
        f"--container-mounts={mounts}",
        f"--container-workdir={Path.cwd()}",
    ], []


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def manifests(job: Submission, given: argparse.Namespace, config_text: str) -> str:
    """Return all objects as YAML documents, in the order in which to create them.

    A ConfigMap holds the config.

    Raises UsageError: an option is missing or wrong.
    """
    if given.image is None:
        raise UsageError(
            "--image is missing",
            fix="--image REGISTRY/NAME:TAG, with Python, torch and Lockstep in it",
        )
    for pair in given.request:
        if not all(pair.partition("=")):
            raise UsageError(
                f"--request {pair} is not NAME=VALUE", fix="--request cpu=8 --request memory=64Gi"
            )
    metadata = {"name": job.name} | ({"namespace": given.namespace} if given.namespace else {})
    # Names must resolve before pods are ready: a pod is ready after the rendezvous.
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"job-name": job.name},
        "ports": [{"name": "rendezvous", "port": DEFAULT_PORT}],
    }
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata,
            "data": {"config.yaml": config_text},
        },
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": _indexed_job(job, given),
        },
    ]
    return "---\n".join(
        yaml.dump(one, Dumper=_Dumper, sort_keys=False, width=110) for one in objects
    )


def _indexed_job(job: Submission, given: argparse.Namespace) -> dict[str, Any]:
    """Return the Indexed Job of Kubernetes: one pod a machine, each with its number."""
    folder = str(Path(given.mount_path, job.output_dir) if given.claim else job.output_dir)
    words = [shlex.quote(word) for word in job.command(f"{_CONFIG_FOLDER}/config.yaml", folder)]
    if job.nodes > 1:  # the shell expands the variable
        words += [
            "--node-rank",
            '"$JOB_COMPLETION_INDEX"',
            "--master-addr",
            f"{job.name}-0.{job.name}",
            "--master-port",
            str(DEFAULT_PORT),
        ]
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": _CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": job.name}},
        # 64 MB is too little for workers and NCCL
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    if given.claim:
        mounts.append({"name": "data", "mountPath": str(given.mount_path)})
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": given.claim}})
    requests = dict(pair.partition("=")[::2] for pair in given.request)
    limits = {"nvidia.com/gpu": job.gpus} if job.gpus else {}
    container = {
        "name": "lockstep",
        "image": given.image,
        # `exec` lets signals reach the launcher
        "command": ["sh", "-c", "exec " + " ".join(words)],
        "env": [{"name": name, "value": value} for name, value in job.environment.items()],
        "resources": {
            name: value for name, value in (("requests", requests), ("limits", limits)) if value
        },
        "volumeMounts": mounts,
    }
    on_exit = {"containerName": "lockstep", "operator": "In"}
    rules = [
        # saved: restart it
        {"action": "Ignore", "onExitCodes": on_exit | {"values": [EXIT_PREEMPTED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        # a retry does not repair a config
        {"action": "FailJob", "onExitCodes": on_exit | {"values": [EXIT_USAGE]}},
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
