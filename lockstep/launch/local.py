"""Runs `lockstep train` and `lockstep launch` on this machine, alone or as one of several.

    launch(LaunchJob(…), options, processes)      N ranks through torch's elastic agent

One machine needs no address and no port: the launcher's store takes a free port and passes it to the ranks. Several
machines meet at `--rdzv-endpoint`, or at `--master-addr:--master-port`, where `--node-rank` numbers the machines. Loads
torch inside functions only.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep import heartbeat, signals
from lockstep.cores import threads_per_rank
from lockstep.environment import check_numbers
from lockstep.errors import EXIT_FAILED, EXIT_PREEMPTED, LockstepError, RunError
from lockstep.launch.failures import Failure, exit_code, first_cause
from lockstep.launch.hang import HangWatch
from lockstep.launch.options import LaunchOptions, endpoint, explain, rendezvous_host, run_id
from lockstep.launch.worker import FAILURES, LAUNCHER_PID, environment_with, print_error
from lockstep.network import interface_variables
from lockstep.records import RunDirectory
from lockstep.run_lock import LAUNCH
from lockstep.scratch import remove, scratch_folder

_OTHER_MACHINES_SECONDS = 2.0  # how long to wait for another machine's failure file


@dataclass(frozen=True)
class LaunchJob:
    """The program that the ranks run.

    Attributes:
        arguments: after `python`, the same on every rank.
        logs: the folder of the run's logs.
        environment: variables for every rank.
        hang: `factor`, `seconds` and `patience` of the `HangWatch`; a script that makes a Trainer replaces them by
            those of its config.
    """

    arguments: Sequence[str]
    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    hang: tuple[float | None, float, float] = (20.0, 60.0, 1800.0)


def launch(job: LaunchJob, options: LaunchOptions, processes: int) -> int:
    """Run the job's ranks on this machine until all have ended; call it from the main thread.

    Returns:
        the exit code: 0, 1 or 2 after one message, 75 if all ranks were preempted and have saved.
    """
    options.check()
    check_numbers(os.environ)
    job.logs.mkdir(parents=True, exist_ok=True)
    scratch = scratch_folder("launch")
    failures, beats = _failures_folder(job.logs, options, scratch), scratch / "heartbeats"
    beats.mkdir()
    try:
        with (
            signals.answered(_exit_on_signal),
            environment_with(_environment(job, options, failures, processes) | {heartbeat.FOLDER: str(beats)}),
        ):
            return _run_agent(job, options, processes, failures, HangWatch(beats, job.logs, *job.hang))
    except LockstepError as error:
        print_error(error)
        return error.exit_code
    finally:
        remove(scratch)
        for path in job.logs.glob("rank-*.stacks.txt"):
            with suppress(FileNotFoundError):  # launchers of other machines clean the same folder
                if not path.stat().st_size:
                    path.unlink()


def _run_agent(job: LaunchJob, options: LaunchOptions, processes: int, failures: Path, watch: HangWatch) -> int:
    from lockstep.launch.agent import CLOSING_SECONDS, Agent, StoppedBySignalError, silence_torch, wait_for_failures
    from lockstep.launch.rendezvous_handlers import open_store

    silence_torch()
    if options.several_nodes:
        _log(f"waiting for {options.nnodes} machines at {endpoint(options)}; start this command on each of them")

    def on_restart(cause: Failure | None, left: int) -> None:
        reason = "machines joined or left" if cause is None else str(cause.error()).replace("\n", "\n  ")
        _log(f"starting the ranks again ({left} more restart{'s' * (left != 1)} left): {reason}")
        if cause is None or not cause.consequence:
            with suppress(OSError):  # the disk is full: the line above has the same information
                RunDirectory(job.logs.parent).append_event("restart", reason=reason, left=left)

    agent = store = None
    try:
        store = open_store(options, _log)  # the other machines can join as long as it is held
        _log_interface(options)
        agent = Agent(
            _worker_spec(job, options, processes, store),
            failures=failures, logs=job.logs, on_restart=on_restart, watch=watch,
            checkpoints=RunDirectory(job.logs.parent).checkpoints, shutdown_timeout=options.shutdown_timeout,
        )  # fmt: skip
        signals.listen(agent.on_signal)
        result = agent.run()
        ended = agent.failed(result)
        cause = first_cause(ended)
        if agent.others_failed or (cause is not None and cause.consequence and options.several_nodes):
            cause = first_cause(wait_for_failures(failures, _OTHER_MACHINES_SECONDS)) or cause
        if agent.others_failed and cause is None:
            raise RunError("the ranks of another machine failed", fix="its launcher says why")
        if cause is not None and agent.stop_signal is not None and cause.kind == "signal":
            raise StoppedBySignalError(agent.stop_signal)
        may_be_stopped = agent.stop_signal is not None or options.several_nodes
        code = exit_code(ended if cause is None else [*ended, cause], may_be_stopped=may_be_stopped)
        early = next((failure for failure in ended if failure.before_training), None)
        if code == EXIT_PREEMPTED and early is not None:
            _log(early.what)
        elif cause is not None:
            print_error(cause.error(), cause.traceback)
        return code
    except StoppedBySignalError as stopped:
        print_error(stopped.error())
        return EXIT_FAILED
    except Exception as error:
        raise explain(error, options) from error
    finally:
        if agent is not None:
            agent.leave_rendezvous(CLOSING_SECONDS)
        del store


def _worker_spec(job: LaunchJob, options: LaunchOptions, processes: int, store: Any) -> Any:
    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from lockstep.launch.rendezvous_handlers import handler, own_address

    return WorkerSpec(
        role=options.role,
        local_world_size=processes,
        entrypoint=sys.executable,
        args=tuple(job.arguments),
        rdzv_handler=handler(options, store),
        max_restarts=options.max_restarts,
        monitor_interval=options.monitor_interval,
        local_addr=options.local_addr or own_address(options),
    )


def _exit_on_signal(number: int) -> None:
    signals.end_now(EXIT_PREEMPTED, f"stopped by {signals.name_of(number)} before ranks were started")


def _failures_folder(logs: Path, options: LaunchOptions, scratch: Path) -> Path:
    """Return a folder of this launch; several machines share one, so that each can report the first cause."""
    folder = (logs if options.several_nodes else scratch) / "failures"
    folder.mkdir(exist_ok=True)
    return folder


def _environment(job: LaunchJob, options: LaunchOptions, failures: Path, processes: int) -> dict[str, str]:
    added = {LAUNCHER_PID: str(os.getpid()), FAILURES: str(failures.absolute())}
    added["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"  # else torch's handlers replace ours, and raise
    if options.several_nodes:
        added |= interface_variables(rendezvous_host(options)) | {LAUNCH: f"{run_id(options)} at {endpoint(options)}"}
    added |= job.environment
    if "TORCH_FR_BUFFER_SIZE" not in os.environ:
        added.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # collectives that torch's flight recorder keeps
    if "OMP_NUM_THREADS" not in os.environ:
        added.setdefault("OMP_NUM_THREADS", str(threads_per_rank(processes)))
    return added


def _log_interface(options: LaunchOptions) -> None:
    """Log the network interfaces that gloo and NCCL use between machines."""
    if not options.several_nodes:
        return
    gloo, nccl = (os.environ.get(f"{name}_SOCKET_IFNAME", "") for name in ("GLOO", "NCCL"))
    if gloo or nccl:
        which = gloo if gloo == nccl.removeprefix("=") else f"{gloo or '?'} (gloo), {nccl or '?'} (NCCL)"
        _log(f"traffic between machines: {which}; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another")


def _log(text: str) -> None:
    print(f"lockstep: {text}", file=sys.stderr, flush=True)
