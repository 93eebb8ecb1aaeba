"""`lockstep train` and `lockstep launch` on this machine, as one of one or of several.

    launch(Job(…), options)      N ranks through torch's elastic agent
    how_many(options, …)         how many processes, and why

One machine needs no address and no port: the agent's store takes a free one and hands it to the ranks, so no rank picks
one that the others can't know. Several machines meet at `--rdzv-endpoint`, or at `--master-addr:--master-port`, where
`--node-rank` numbers the machines. Loads torch inside functions only.
"""

import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import heartbeat
from lockstep.errors import EXIT_FAILED, LockstepError, RunError, UsageError
from lockstep.launch.failures import Failure, exit_code, first_cause
from lockstep.launch.hang import HangWatch
from lockstep.launch.meeting import endpoint, explained, is_host, meeting_host, meeting_point
from lockstep.launch.worker import FAILURES, LAUNCHER_PID, environment_with, print_error
from lockstep.records import RunDirectory

_CLOSING_SECONDS = 5.0  # for a farewell; a link that is cut would hold it for a minute
_OTHERS_SECONDS = 2.0  # how long to wait for another machine's account of a failure


@dataclass(frozen=True)
class LaunchOptions:
    """What people say about processes and machines, by torchrun's names."""

    nproc_per_node: str | None = None
    nnodes: str = "1"
    node_rank: int | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    rdzv_conf: Mapping[str, str] = field(default_factory=dict)
    master_addr: str | None = None
    master_port: int | None = None
    max_restarts: int = 0

    @property
    def nodes(self) -> tuple[int, int]:
        """Fewest and most machines.

        Raises:
            UsageError: neither `N` nor `MIN:MAX`.
        """
        low, _, high = self.nnodes.partition(":")
        try:
            fewest, most = int(low), int(high or low)
        except ValueError:
            fewest, most = 0, 0
        if not 1 <= fewest <= most:
            raise UsageError(f"--nnodes {self.nnodes} is neither a number from 1 on nor MIN:MAX", where="--nnodes")
        return fewest, most

    @property
    def several_nodes(self) -> bool:
        return self.nodes[1] > 1

    def check(self) -> None:
        """Refuse what can't be started, before anything is.

        Raises:
            UsageError: naming the option.
        """
        fewest, most = self.nodes
        if self.max_restarts < 0:
            raise UsageError(f"--max-restarts {self.max_restarts} is below 0", where="--max-restarts")
        if self.nproc_per_node not in (None, "auto", "gpu"):
            _positive("--nproc-per-node", self.nproc_per_node, "a number from 1 on, or auto")
        if self.master_port is not None and not 0 < self.master_port < 65536:
            raise UsageError(f"--master-port {self.master_port} is no port", where="--master-port")
        if self.node_rank is not None and not 0 <= self.node_rank < most:
            raise UsageError(
                f"--node-rank {self.node_rank} is not below --nnodes {self.nnodes}",
                where="--node-rank",
                why="machines are numbered from 0",
            )
        if most > 1 and self.rdzv_endpoint is None and self.master_addr is None:
            raise UsageError(
                f"--nnodes {self.nnodes} needs the address where the machines meet",
                fix="on every machine: --rdzv-endpoint HOST:PORT, or --master-addr HOST [--master-port PORT] with"
                " --node-rank 0, 1, …; HOST is the first machine",
            )
        if most > 1 and self.rdzv_endpoint is None and (self.node_rank is None or fewest != most):
            raise UsageError(
                "--master-addr needs --node-rank and a fixed --nnodes",
                fix="number the machines from 0 with --node-rank, or use --rdzv-endpoint HOST:PORT, which numbers them",
            )


@dataclass(frozen=True)
class Job:
    """What the ranks run.

    Attributes:
        arguments: after `python`, the same on every rank.
        logs: the folder of the run's logs.
        environment: variables for every rank.
        hang: `factor`, `seconds` and `patience` of the `HangWatch`; a factor of None: nothing is taken for a hang.
    """

    arguments: Sequence[str]
    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    hang: tuple[float | None, float, float] = (None, 60.0, 1800.0)


def how_many(options: LaunchOptions, *, use_gpus: bool = True, alone: str | None = None) -> tuple[int, str]:
    """Processes on this machine, and why so many.

    Args:
        use_gpus: False where the config keeps to the CPU.
        alone: why one process is right whatever there is, unless the user gave a number.
    """
    asked = options.nproc_per_node
    if asked not in (None, "auto", "gpu"):
        return _positive("--nproc-per-node", asked, ""), "as asked"
    if alone is not None and asked is None:
        return 1, alone
    gpus = count_gpus() if use_gpus else 0
    if gpus:
        return gpus, "one for each visible GPU"
    if asked == "gpu":
        raise UsageError("--nproc-per-node gpu, but no GPU is visible here")
    return (
        1,
        "no GPU is visible; --nproc-per-node N starts more"
        if use_gpus
        else "on the CPU; --nproc-per-node N starts more",
    )


def count_gpus() -> int:
    """GPUs that torch sees."""
    import torch

    return torch.cuda.device_count()


def launch(job: Job, options: LaunchOptions, processes: int) -> int:
    """Run the job's ranks on this machine until all have ended. Call it from the main thread.

    Returns:
        the exit code: 0, 1 or 2 after one message, 75 where all ranks were preempted and have saved.
    """
    options.check()
    job.logs.mkdir(parents=True, exist_ok=True)
    failures = _failures_folder(job.logs, options)
    beats = Path(tempfile.mkdtemp(prefix="lockstep-heartbeats-"))
    try:
        with environment_with(_environment(job, options, failures, processes) | {heartbeat.FOLDER: str(beats)}):
            return _run_agent(job, options, processes, failures, HangWatch(beats, job.logs, *job.hang))
    except LockstepError as error:
        print_error(error)
        return error.exit_code
    finally:
        shutil.rmtree(beats, ignore_errors=True)
        if not options.several_nodes:
            shutil.rmtree(failures, ignore_errors=True)
        for path in job.logs.glob("rank-*.stacks.txt"):
            if not path.stat().st_size:
                path.unlink(missing_ok=True)


def _run_agent(job: Job, options: LaunchOptions, processes: int, failures: Path, watch: HangWatch) -> int:
    import signal

    from lockstep.launch.agent import PASSED_ON, Agent, StoppedBySignalError, quiet_library, wait_for_files

    quiet_library()
    if options.several_nodes:
        _say(f"waiting for {options.nnodes} machines at {endpoint(options)}; start this command on each of them")

    def on_restart(cause: Failure | None, left: int) -> None:
        reason = "machines joined or left" if cause is None else str(cause.error()).replace("\n", "\n  ")
        _say(f"starting the ranks again ({left} more restart{'s' * (left != 1)} left): {reason}")
        if cause is None or not cause.consequence:
            RunDirectory(job.logs.parent).append_event("restart", reason=reason, left=left)

    handlers = {number: signal.getsignal(number) for number in PASSED_ON}
    agent = held = None
    try:
        held = meeting_point(options, _say)  # the others find it as long as it is held
        spec = _worker_spec(job, options, processes)
        agent = Agent(
            spec, failures=failures, logs=job.logs, on_restart=on_restart, watch=watch,
            checkpoints=RunDirectory(job.logs.parent).checkpoints,
        )  # fmt: skip
        with agent.signals_kept():
            pass
        result = agent.run()
        ended = agent.failed(result)
        cause = first_cause(ended)
        if cause is not None and cause.consequence and options.several_nodes:
            cause = first_cause(wait_for_files(failures, _OTHERS_SECONDS)) or cause
        if cause is not None and agent.stop_signal is not None and cause.kind == "signal":
            raise StoppedBySignalError(agent.stop_signal)
        if cause is not None:
            print_error(cause.error(), cause.traceback)
        return exit_code(ended)
    except StoppedBySignalError as stopped:
        print_error(RunError(f"stopped by {stopped.name}", why="the ranks did not save and leave by themselves"))
        return EXIT_FAILED
    except Exception as error:
        raise explained(error, options) from error
    finally:
        if agent is not None:
            _leave_the_others(agent)
        del held
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _leave_the_others(agent: Any) -> None:
    """Tell the other machines that this one is done, where they can be reached."""
    import threading

    closing = threading.Thread(target=agent._rdzv_handler.shutdown, daemon=True)
    closing.start()
    closing.join(_CLOSING_SECONDS)


def _worker_spec(job: Job, options: LaunchOptions, processes: int) -> Any:
    import torch.distributed.elastic.rendezvous.registry as registry
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    from lockstep.cluster import address_towards

    fewest, most = options.nodes
    numbered = options.rdzv_endpoint is None and (most > 1 or options.master_port is not None)
    conf: dict[str, Any] = {"timeout": 900, **options.rdzv_conf}
    local_address = None
    if numbered:
        conf["rank"] = options.node_rank or 0
    else:
        # The ranks meet at an address of the machine with rank 0; its host's name may not resolve elsewhere, or here.
        local_address = address_towards(meeting_host(options))
        hosting = is_host(options)
        if "is_host" not in conf and hosting is not None:
            conf["is_host"] = str(hosting).lower()
    parameters = RendezvousParameters(
        backend="static" if numbered else "c10d",
        endpoint=endpoint(options),
        run_id=options.rdzv_id or ("lockstep" if most > 1 else uuid.uuid4().hex),
        min_nodes=fewest,
        max_nodes=most,
        local_addr=local_address,
        **conf,
    )
    host, port = (meeting_host(options), endpoint(options).rsplit(":", 1)[1]) if numbered else (None, None)
    return WorkerSpec(
        role="rank",
        local_world_size=processes,
        entrypoint=sys.executable,
        args=tuple(job.arguments),
        rdzv_handler=registry.get_rendezvous_handler(parameters),
        max_restarts=options.max_restarts,
        monitor_interval=0.1,
        master_addr=host,
        master_port=None if port is None else int(port),
        local_addr=local_address,
    )


def _failures_folder(logs: Path, options: LaunchOptions) -> Path:
    """On one machine a folder of its own; on several one that they share, so that each can tell the first cause."""
    if not options.several_nodes:
        return Path(tempfile.mkdtemp(prefix="lockstep-failures-"))
    folder = logs / "failures"
    folder.mkdir(exist_ok=True)
    return folder


def _environment(job: Job, options: LaunchOptions, failures: Path, processes: int) -> dict[str, str]:
    from lockstep.cluster import gloo_interface, threads_per_rank

    added = {LAUNCHER_PID: str(os.getpid()), FAILURES: str(failures.absolute())}
    if options.several_nodes:
        added |= gloo_interface(meeting_host(options))
    added |= job.environment
    if "TORCH_FR_BUFFER_SIZE" not in os.environ:
        added.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that torch's flight recorder remembers
    if "OMP_NUM_THREADS" not in os.environ:
        added.setdefault("OMP_NUM_THREADS", str(threads_per_rank(processes)))
    return added


def _positive(name: str, value: str | None, wanted: str) -> int:
    try:
        number = int(value or "")
    except ValueError:
        number = 0
    if number < 1:
        raise UsageError(f"{name} {value} is not {wanted}", where=name)
    return number


def _say(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
