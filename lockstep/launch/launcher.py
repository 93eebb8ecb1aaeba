"""Runs the ranks of a job on this machine, under torch's elastic agent, until all have ended.

    `launch`
      1  folders that the launcher shares with its ranks, and the ranks' environment variables
      2  the agent: it starts the ranks, starts them again, or lets survivors go on
      3  the first cause of a failure, printed once; the exit code
      4  what ranks could not save themselves: the copy in memory, records for a bucket

Loads torch inside functions only.

Tests: tests/launch/test_local.py, tests/launch/test_torchrun.py, tests/live/test_ranks.py,
tests/launch/test_machines.py
"""

import gc
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.errors import EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, LockstepError, RunError
from lockstep.failures.failure import Failure, exit_code, first_cause
from lockstep.failures.hang import HangWatch
from lockstep.files.object_client import client_of, run_apart
from lockstep.heartbeat.files import FOLDER
from lockstep.launch.options import LaunchOptions, endpoint, explain, rendezvous_host, run_id
from lockstep.launch.worker import FAILURES, LAUNCHER_PID, environment_with
from lockstep.live.hosts import LiveHosts
from lockstep.live.ranks import CanTrain, LiveRanks
from lockstep.live.world import LiveWorld
from lockstep.machine import signals
from lockstep.machine.cores import threads_per_rank
from lockstep.machine.environment import MEMORY, WORLD, check_numbers
from lockstep.machine.network import interface_variables
from lockstep.machine.scratch import SHARED_MEMORY, remove, scratch_folder
from lockstep.prepared.rank_starts import RankStarter, rank_starter
from lockstep.run_directory.rank_output import print_error
from lockstep.run_directory.records import RunDirectory
from lockstep.run_directory.run_lock import LAUNCH
from lockstep.run_directory.run_mirror import push_after_ranks

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult

    from lockstep.launch.agent import Agent

# how long to wait for another machine's failure file, which a busy machine takes seconds to write
_OTHER_MACHINES_SECONDS = 10.0


def log(text: str, *, to_stderr: bool = False) -> None:
    """Print a line of the launcher."""
    print(f"lockstep: {text}", file=sys.stderr if to_stderr else None, flush=True)


log_to_stderr = partial(log, to_stderr=True)


def import_without_gc(name: str) -> Any:
    """Import a module, and return it.

    Collections of garbage find none in what is imported, and take a tenth of the time.
    """
    gc.disable()
    try:
        return import_module(name)
    finally:
        gc.enable()


@dataclass(frozen=True)
class LaunchJob:
    """The program that the ranks run."""

    arguments: Sequence[str]  # after `python`, the same on every rank
    logs: Path
    environment: Mapping[str, str] = field(default_factory=dict)  # for every rank
    # `factor`, `seconds` and `patience` of the `HangWatch`; a Trainer in a script replaces them by
    # those of its config
    hang: tuple[float | None, float, float] = (20.0, 60.0, 1800.0)
    # why its ranks must be fresh processes ("": it is not worth a line); None: they may be forks
    fresh: str | None = None
    # says how many ranks can go on when some have died; None: they do not
    can_train: CanTrain | None = None
    # the bucket that has the run's records, too, and their folder here
    mirrored: tuple[Mapping[str, Any], Path] | None = None
    # the run whose newest copy in memory is saved when the launch ends with an error
    saves: RunDirectory | None = None


def launch(job: LaunchJob, options: LaunchOptions, processes: int) -> int:
    """Run the job's ranks here until all have ended, from the main thread.

    Return 0, 1, 2, or 75 if all have saved.
    """
    options.check()
    check_numbers(os.environ)
    job.logs.mkdir(parents=True, exist_ok=True)
    local_launch = _LocalLaunch(job, options, processes)
    variables = local_launch.variables()
    code = EXIT_FAILED
    try:
        with (
            signals.answered(_exit_before_ranks),
            environment_with(variables),
            rank_starter(job.fresh, log_to_stderr, restarts=options.max_restarts > 0) as starter,
        ):
            code = local_launch.run(starter)
        return code
    except LockstepError as error:
        print_error(error)
        return error.exit_code
    finally:
        local_launch.clean_up(failed=code != EXIT_DONE)


def _exit_before_ranks(number: int) -> None:
    """Answer a signal that comes before the agent listens to signals."""
    signals.end_now(
        EXIT_PREEMPTED, f"stopped by {signals.name_of(number)} before ranks were started"
    )


class _LocalLaunch:
    """One launch on this machine: its folders, its agent, and what is left to do after it."""

    def __init__(self, job: LaunchJob, options: LaunchOptions, processes: int) -> None:
        self.job = job
        self.options = options
        self.processes = processes
        self.run_directory = RunDirectory(job.logs.parent)
        self.scratch = scratch_folder("launch")
        # Several machines share the logs' folder, so that each can report the first cause.
        self.failures = (job.logs if options.several_nodes else self.scratch) / "failures"
        self.failures.mkdir(exist_ok=True)
        self.beats = self.scratch / "heartbeats"
        self.beats.mkdir()
        # where ranks copy their run, for those that are started again
        # (lockstep/checkpoint/memory.py)
        outlived = options.max_restarts > 0 or job.can_train is not None
        keeps = outlived and SHARED_MEMORY.is_dir()
        self.memory = scratch_folder("memory", SHARED_MEMORY) if keeps else None
        # whether this machine saves the newest copy in memory if the launch has failed
        self.keeps_copies = False

    def variables(self) -> dict[str, str]:
        """Return the environment variables of every rank; the job's own win."""
        options = self.options
        variables = {
            LAUNCHER_PID: str(os.getpid()),
            FAILURES: str(self.failures.absolute()),
            FOLDER: str(self.beats),
            MEMORY: "" if self.memory is None else str(self.memory),
            WORLD: "" if self.job.can_train is None else str(self.scratch / "world.json"),
        }
        # else torch's handlers replace ours, and raise
        variables["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        if options.several_nodes:
            variables |= interface_variables(rendezvous_host(options))
            variables[LAUNCH] = f"{run_id(options)} at {endpoint(options)}"
        variables |= self.job.environment
        if "TORCH_FR_BUFFER_SIZE" not in os.environ:
            # collectives that torch's flight recorder keeps
            variables.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
        if "OMP_NUM_THREADS" not in os.environ:
            variables.setdefault("OMP_NUM_THREADS", str(threads_per_rank(self.processes)))
        return variables

    def run(self, starter: RankStarter) -> int:
        """Run the ranks under torch's elastic agent; return the exit code."""
        watch = HangWatch(self.beats, self.job.logs, *self.job.hang)
        import_without_gc("lockstep.launch.agent")
        from lockstep.launch.agent import CLOSING_SECONDS
        from lockstep.launch.rendezvous_handlers import open_store
        from lockstep.torch_compat.rank_processes import started_by

        # prints a banner for each failed rank
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        if self.options.several_nodes:
            self._log_rendezvous()
        live = self._live_ranks(watch)
        agent = None
        store = None
        try:
            # the other machines can join as long as it is held
            store = open_store(self.options, log_to_stderr)
            agent = self._agent(store, watch, live)
            signals.listen(agent.on_signal)
            with started_by(starter):
                result = agent.run()
            return self._report_end(agent, result)
        except Exception as error:
            raise explain(error, self.options) from error
        finally:
            watch.hear_from(None)
            if isinstance(live, LiveHosts):
                live.close()
            if agent is not None:
                self.keeps_copies = agent.keeps_copies
                agent.leave_rendezvous(CLOSING_SECONDS)
            del store

    def clean_up(self, *, failed: bool) -> None:
        """Remove the folders of the launch; save first what only they hold."""
        remove(self.scratch)
        if self.memory is not None:
            if failed and self.job.saves is not None and self.keeps_copies:
                _save_newest_copy(self.memory, self.job.saves)
            remove(self.memory)
        for path in self.job.logs.glob("rank-*.stacks.txt"):
            with suppress(FileNotFoundError):  # launchers of other machines clean the same folder
                if not path.stat().st_size:
                    path.unlink()
        if self.job.mirrored is not None:
            _push_records(*self.job.mirrored)

    # ---- the agent, and what it reports ----

    def _live_ranks(self, watch: HangWatch) -> LiveRanks | None:
        """Return what lets survivors go on after a death; None where the job does not."""
        if self.job.can_train is None:
            return None
        kind = LiveHosts if self.options.several_nodes else LiveRanks
        world_file = Path(os.environ[WORLD])
        return kind(world_file, watch.folder, self.failures, self.job.can_train, self._on_new_world)

    def _agent(self, store: Any, watch: HangWatch, live: LiveRanks | None) -> "Agent":
        from torch.distributed.elastic.agent.server.api import WorkerSpec

        from lockstep.launch.agent import Agent
        from lockstep.launch.rendezvous_handlers import handler, own_address

        options = self.options
        spec = WorkerSpec(
            role=options.role,
            local_world_size=self.processes,
            entrypoint=sys.executable,
            args=tuple(self.job.arguments),
            rdzv_handler=handler(options, store),
            max_restarts=options.max_restarts,
            monitor_interval=options.monitor_interval,
            local_addr=options.local_addr or own_address(options),
        )
        return Agent(
            spec,
            meeting=store,
            failures=self.failures,
            logs=self.job.logs,
            on_restart=self._on_restart,
            watch=watch,
            checkpoints=self.run_directory.checkpoints,
            memory=self.memory,
            live=live,
            shutdown_timeout=options.shutdown_timeout,
        )

    def _report_end(self, agent: "Agent", result: "RunResult") -> int:
        """Print the first cause of a failure, if there was one; return the exit code."""
        from lockstep.launch.agent import stopped_by, wait_for_failures

        several = self.options.several_nodes
        failures = agent.failed(result)
        cause = first_cause(failures)
        is_consequence = cause is not None and cause.consequence and several
        if agent.others_failed or agent.others_are_lost or is_consequence:
            cause = first_cause(wait_for_failures(self.failures, _OTHER_MACHINES_SECONDS)) or cause
        if agent.others_failed and cause is None:
            raise RunError("the ranks of another machine failed", fix="its launcher says why")
        if cause is not None and agent.stop_signal is not None and cause.kind == "signal":
            raise stopped_by(agent.stop_signal)

        may_be_stopped = agent.stop_signal is not None or several
        causes = failures if cause is None else [*failures, cause]
        code = exit_code(causes, may_be_stopped=may_be_stopped)
        early = next((failure for failure in failures if failure.before_training), None)
        if code == EXIT_PREEMPTED and early is not None:
            log_to_stderr(early.what)
        elif cause is not None:
            print_error(cause.error(), cause.traceback)
        return code

    def _log_rendezvous(self) -> None:
        """Log where machines meet, and which network interfaces the environment chooses."""
        log_to_stderr(
            f"waiting for {self.options.nnodes} machines at {endpoint(self.options)}; start this"
            " command on each of them"
        )
        gloo = os.environ.get("GLOO_SOCKET_IFNAME", "")
        nccl = os.environ.get("NCCL_SOCKET_IFNAME", "")
        if not gloo and not nccl:
            return
        same = gloo == nccl.removeprefix("=")
        interfaces = gloo if same else f"{gloo or '?'} (gloo), {nccl or '?'} (NCCL)"
        log_to_stderr(
            f"traffic between machines: {interfaces}; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
            " choose another"
        )

    def _on_restart(self, cause: Failure | None, left: int) -> None:
        """Report that ranks are started again, and that `left` more restarts are allowed."""
        if cause is None:
            reason = "machines joined or left"
        else:
            reason = str(cause.error()).replace("\n", "\n  ")
        log_to_stderr(
            f"starting the ranks again ({left} more restart{'s' * (left != 1)} left): {reason}"
        )
        if cause is None or not cause.consequence:
            with suppress(OSError):  # the disk is full: the line above has the same information
                self.run_directory.append_event("restart", reason=reason, left=left)

    def _on_new_world(self, world: LiveWorld) -> None:
        """Report on the console, and in the run's events, who died and who goes on."""
        lost = ", ".join(f"rank {rank}" for rank in world.lost)
        were = "was" if len(world.lost) == 1 else "were"
        remaining = len(world.members)
        go_on = "1 rank goes" if remaining == 1 else f"{remaining} ranks go"
        waiting = f"; waiting for a place: {len(world.spares)}" if world.spares else ""
        log_to_stderr(f"{lost} {were} killed: {go_on} on, in the same processes{waiting}")
        with suppress(OSError):
            self.run_directory.append_event(
                "recovery",
                lost=list(world.lost),
                ranks=len(world.members),
                spares=len(world.spares),
                generation=world.generation,
            )


# ---- after the ranks ----


def _push_records(bucket: Mapping[str, Any], run: Path) -> None:
    """Copy what the ranks could not, and their logs, to the bucket of the run."""
    try:
        run_apart(lambda: push_after_ranks(client_of(bucket, starting=True), run), bucket["url"])
    except LockstepError as error:
        log_to_stderr(f"warning: the last records are in {run} alone: {error}")


def _save_newest_copy(memory: Path, run: RunDirectory) -> None:
    """Save the newest copy in memory among the run's checkpoints, where it is newer."""
    checkpoint = import_without_gc("lockstep.checkpoint")
    try:
        copies = checkpoint.copies_of(memory, run.path)
        copies.adopt(run.recorded_step)
        path = checkpoint.save_newest(copies, run.checkpoints)
        if path is not None:
            run.append_event("save", step=checkpoint.step_of(path.name), checkpoint=path.name)
            log_to_stderr(f"the newest copy in memory is saved: {path}")
    except (OSError, LockstepError) as error:
        log_to_stderr(f"warning: the newest copy in memory could not be saved: {error}")
