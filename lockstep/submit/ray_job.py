"""A run as a job of a Ray cluster: what is handed to its job server, and what became of the job.

Source: docs.ray.io/en/latest/cluster/running-applications/job-submission (the client; the time
that a job has to end, RAY_JOB_STOP_WAIT_TIME_S).

Tests: tests/submit/test_ray.py, tests/submit/test_real_ray.py, tests/submit/test_ray_train.py
"""

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import RunError, UsageError, first_line
from lockstep.submit.submission import PlainDumper, Submission

_CONFIG = "config.yaml"
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


@dataclass(frozen=True)
class RayJob:
    """Describes a run to its driver."""

    command: list[str]  # `python -m lockstep train …` of one machine, without where they meet
    nodes: int
    bundle: dict[str, float]  # what one machine has to have, by Ray's names
    max_losses: int  # how many lost machines are replaced

    @property
    def strategy(self) -> str:
        """The placement group's strategy: each bundle on a machine of its own."""
        return "STRICT_SPREAD" if self.nodes > 1 else "STRICT_PACK"

    def words(self, number: int, address: str, port: int | str) -> list[str]:
        """Return the command of the machine with this number."""
        where = ["--node-rank", str(number), "--master-addr", address, "--master-port", str(port)]
        return [*self.command, *(where if self.nodes > 1 else [])]


@dataclass(frozen=True)
class Plan:
    """Describes a job to the job server of a cluster."""

    entrypoint: str  # the command of the driver
    job: RayJob
    working_dir: Path | None  # a folder for every machine; None: one with the config alone
    config: str | None  # the text of the config where there is no such folder
    environment: dict[str, str]  # for the job server's own process, and the driver

    def shown(self, address: str | None) -> str:
        """Return the plan as YAML."""
        where = (
            {"working_dir": str(self.working_dir)}
            if self.config is None
            else {"working_dir": {_CONFIG: yaml.safe_load(self.config)}}
        )
        tree: dict[str, Any] = {
            "job server": address or "as RAY_API_SERVER_ADDRESS says, or http://127.0.0.1:8265",
            "entrypoint": self.entrypoint,
            "runtime_env": {**where, "env_vars": self.environment},
            "placement group": {
                "bundles": [self.job.bundle] * self.job.nodes,
                "strategy": self.job.strategy,
            },
            "machines": [
                shlex.join(self.job.words(number, "ADDRESS-OF-MACHINE-0", "PORT"))
                for number in range(self.job.nodes)
            ],
        }
        return yaml.dump(tree, Dumper=PlainDumper, sort_keys=False, width=100)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only Ray has."""
    add = parser.add_argument
    add_address(parser)
    add(
        "--cpus-per-node",
        metavar="N",
        type=int,
        help="cores that a machine reserves in the cluster (default: one a rank)",
    )
    add(
        "--working-dir",
        metavar="DIR",
        type=Path,
        help="a folder that each machine gets, with the config, code and small data in it"
        " (default: the config alone)",
    )
    add(
        "--max-losses",
        metavar="N",
        type=int,
        default=3,
        help="how many lost machines are replaced (default: 3)",
    )
    add(
        "--grace-seconds",
        metavar="N",
        type=int,
        default=120,
        help="time for ranks to save when the job is cancelled (default: 120)",
    )


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the option that names a cluster."""
    parser.add_argument(
        "--address",
        metavar="ADDRESS",
        help="a Ray cluster's job server: http://HEAD:8265 (default: RAY_API_SERVER_ADDRESS)",
    )


def address_options(given: argparse.Namespace) -> tuple[str, ...]:
    """Return the options that name the cluster again."""
    return () if given.address is None else ("--address", given.address)


def planned(job: Submission, given: argparse.Namespace, config_text: str) -> Plan:
    """Return what to hand to the job server; `config_text` is the resolved config.

    Raises UsageError: a number is below 0, or the config is outside of the working directory.
    """
    cpus = job.processes if given.cpus_per_node is None else given.cpus_per_node
    least = {"--cpus-per-node": (cpus, 1), "--max-losses": (given.max_losses, 0)}
    least["--grace-seconds"] = (given.grace_seconds, 0)
    for flag, (number, lowest) in least.items():
        if number < lowest:
            raise UsageError(
                f"{flag} {number} is too low", where=flag, fix=f"write a number from {lowest} on"
            )
    # A relative folder would be in a copy of the working directory, which Ray deletes.
    folder = job.output_dir if job.is_in_bucket else str(Path(job.output_dir).absolute())
    config = _CONFIG
    overrides: tuple[str, ...] = ()  # the resolved config contains them
    if given.working_dir is not None:
        if not job.config.resolve().is_relative_to(given.working_dir.resolve()):
            raise UsageError(
                f"{job.config} lies outside of {given.working_dir}",
                where="--working-dir",
                why="each machine gets that folder, and nothing else",
                fix="name a folder that holds the config",
            )
        config = str(job.config.resolve().relative_to(given.working_dir.resolve()))
        overrides = job.overrides
    bundle = {"CPU": float(cpus)} | ({"GPU": float(job.gpus)} if job.gpus else {})
    command = [*job.with_overrides(overrides).command(config, folder)]
    ray_job = RayJob(command, job.nodes, bundle, given.max_losses)
    words = [*shlex.split(job.python), "-m", "lockstep.submit.ray_driver"]
    return Plan(
        shlex.join([*words, json.dumps(asdict(ray_job))]),
        ray_job,
        given.working_dir,
        config_text if given.working_dir is None else None,
        {"RAY_JOB_STOP_WAIT_TIME_S": str(given.grace_seconds)},
    )


def submit(plan: Plan, given: argparse.Namespace) -> str:
    """Hand the plan to the job server, and return the job's id."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = plan.working_dir
        if folder is None:
            folder = Path(scratch)
            assert plan.config is not None
            (folder / _CONFIG).write_text(plan.config)
        with _client(given) as client:
            job: str = client.submit_job(
                entrypoint=plan.entrypoint,
                runtime_env={"working_dir": str(folder), "env_vars": plan.environment},
            )
    return job


def status(job: str, given: argparse.Namespace) -> str:
    """Return the state of a job, and when it began and ended."""
    with _client(given) as client:
        info = client.get_job_info(job)
    lines = [str(getattr(info.status, "value", info.status))]
    if info.message:
        lines.append(f"message: {first_line(info.message)}")
    for name, stamp in (("begun", info.start_time), ("ended", info.end_time)):
        if stamp:
            at = datetime.fromtimestamp(stamp / 1000, UTC).isoformat(" ", "seconds")
            lines.append(f"{name}: {at}")
    if info.driver_exit_code is not None:
        lines.append(f"exit code: {info.driver_exit_code}")
    return "\n".join(lines)


def logs(job: str, given: argparse.Namespace) -> str:
    """Return what a job has written so far."""
    with _client(given) as client:
        text: str = client.get_job_logs(job)
    return text.rstrip("\n")


def cancel(job: str, given: argparse.Namespace) -> str:
    """End a job: its launchers get SIGTERM, and its ranks save."""
    with _client(given) as client:
        if getattr(client.get_job_status(job), "value", "") in _ENDED:
            return f"ray:{job} has ended already"
        client.stop_job(job)
    return f"ray:{job} is told to end"


VERBS = {"status": status, "logs": logs, "cancel": cancel}


@contextmanager
def _client(given: argparse.Namespace) -> Iterator[Any]:
    """Yield a client of the job server, and raise its errors as ours."""
    try:
        client_class = import_module("ray.job_submission").JobSubmissionClient
    except ImportError:
        raise UsageError(
            "the cluster is asked through ray, which is not installed",
            fix="pip install 'lockstep-train[ray]'",
        ) from None
    where = given.address or "the job server of RAY_API_SERVER_ADDRESS, or of this machine"
    try:
        yield client_class(given.address)
    except ConnectionError as error:
        raise UsageError(
            f"Ray does not answer at {where}",
            why=first_line(error),
            fix="--address http://HOST:8265, the head of the cluster, whose dashboard has to run",
        ) from error
    except (RuntimeError, ValueError) as error:
        raise RunError(f"Ray refuses it at {where}", why=_server_message(error)) from error


def _server_message(error: Exception) -> str:
    """Return what the job server says, without the traceback of its own process."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
