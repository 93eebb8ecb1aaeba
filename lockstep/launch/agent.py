"""Adds signal forwarding, hang detection and a single failure message to torch's elastic agent.

A signal to the launcher is forwarded to the ranks, which may take the time they need to save
(torch's agent allows 30 s); a second Ctrl-C kills them at once; a run that was asked to stop, or
whose config is wrong, is not restarted. Source: docs.pytorch.org/docs/stable/elastic/agent.html,
"Extending the agent". Loads torch.

Tests: tests/launch/test_local.py, tests/launch/test_machines.py, tests/faults/test_processes.py,
tests/faults/test_network.py, tests/faults/test_chaos.py
"""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from lockstep.errors import EXIT_FAILED, EXIT_PREEMPTED, RunError
from lockstep.failures.failure import (
    Failure,
    done_mark,
    first_cause,
    from_exit_code,
    read_all,
)
from lockstep.failures.hang import HangWatch, OtherMachines
from lockstep.heartbeat.watcher import delete_beats
from lockstep.launch.meeting_store import MeetingStore
from lockstep.launch.rendezvous_handlers import Membership
from lockstep.live.hosts import LiveHosts
from lockstep.live.ranks import LiveRanks, Seen
from lockstep.machine import signals
from lockstep.machine.processes import send_signal, wait_for_an_end
from lockstep.run_directory.rank_output import print_error
from lockstep.run_directory.records import RunDirectory
from lockstep.store_threads import answer_within
from lockstep.torch_compat.elastic_agent import ExtensibleAgent

CLOSING_SECONDS = 5.0  # for closing the rendezvous; a broken link would block for a minute
# Schedulers send SIGUSR1 before they end a job.
_FORWARDED = {number: number for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
_FORWARDED[signal.SIGHUP] = signal.SIGTERM
_ENDED = "lockstep/ended"  # key prefix in a round's store: how the ranks of each machine ended
_SEEN = "lockstep/seen"  # key prefix: the machines which ended well, and know how the others ended
_WELL = "well"
_FAILED = "failed"
_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 30.0  # for the store's answer; it must be more than a loaded machine takes


def stopped_by(number: int) -> RunError:
    """Return the error for a launcher that a signal stopped.

    Its ranks did not save and exit by themselves.
    """
    return RunError(
        f"stopped by {signals.name_of(number)}",
        why="the ranks did not save and leave by themselves",
    )


class NothingToTail(LogsSpecs):
    """Leaves the output of ranks to themselves (`worker.to_log`).

    torch's own, without a folder, starts two threads a rank that tail nothing; each end and each
    restart of ranks waits for them, 0.2 s.
    """

    @property
    def root_log_dir(self) -> str:
        """The folder for logs and error files: none."""
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return where each local rank writes: to the launcher's own output, and no error file."""
        for variables in envs.values():
            variables["TORCHELASTIC_ERROR_FILE"] = ""
        own_output = dict.fromkeys(envs, "")
        no_file = dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=own_output, stderrs=own_output, error_files=no_file)


class Agent(ExtensibleAgent):
    """Starts and watches the ranks of one machine.

    `failures` is the folder of `rank-N.json`; those of this machine's ranks are deleted at each
    start. `on_restart` is called before each restart with the failure and the number of restarts
    left. The run's folder of `checkpoints`, and the copies in `memory`, show whether it makes
    progress between failures. The
    peers of a failed rank have `shutdown_timeout` seconds to end. The machines meet through
    `meeting`, the store of the spec's handler.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        meeting: MeetingStore,
        failures: Path,
        logs: Path,
        on_restart: Callable[[Failure | None, int], None],
        watch: HangWatch,
        checkpoints: Path,
        memory: Path | None = None,
        live: LiveRanks | None = None,
        shutdown_timeout: int = 30,
    ) -> None:
        self._seconds_between_looks = spec.monitor_interval
        # torch would sleep before each look, also while a rank dies; it takes no zero
        spec = replace(spec, monitor_interval=1e-6)
        super().__init__(spec, NothingToTail(), shutdown_timeout=shutdown_timeout)
        self._meeting = meeting
        self._failures = failures
        self._logs = logs
        self._on_restart = on_restart
        self._watch = watch
        self._live = live
        self._generation = 0  # of the ranks that are watched
        # ranks hung, and were killed for it: it is not a death to go on from
        self._hang_found = False
        self._loop = CrashLoop(checkpoints, memory)
        self._lock = threading.Lock()
        self._starting = False
        self.stop_signal: int | None = None
        self.others_failed = False
        self.others_are_lost = False  # the store was gone before it said how the others ended
        handler: Any = spec.rdzv_handler
        self._membership = Membership(handler.num_nodes_waiting)
        handler.num_nodes_waiting = self._membership

    def failed(self, result: RunResult) -> list[Failure]:
        """Return the failures of this machine's ranks.

        They are read from files, or from exit codes where there is no file.
        """
        ended = {rank: (0, time.time()) for rank in self._left_early()}
        stop = None if self.stop_signal is None else -_FORWARDED[signal.Signals(self.stop_signal)]
        for rank, process in result.failures.items():
            # The forwarded signal may reach a rank during interpreter shutdown, when its work was
            # done.
            if process.exitcode != stop or not (self._failures / done_mark(rank)).exists():
                # The exit timestamp has whole seconds; add one, so that a rank that wrote a file
                # before comes first.
                ended[rank] = process.exitcode, process.timestamp + 1.0
        written = {failure.rank: failure for failure in read_all(self._failures)}
        failures = [
            written[worker.global_rank]
            for worker in self.worker_group.workers
            if worker.global_rank in written
        ]
        world = self.worker_group.workers[0].world_size
        for rank in ended.keys() - written.keys():
            failure = from_exit_code(rank, world, *ended[rank], self._logs / f"rank-{rank}.log")
            if self._live is not None and self._live.refusal:
                failure = replace(failure, why=f"the others can't go on: {self._live.refusal}")
            failures.append(failure)
        return failures

    def _left_early(self) -> set[int]:  # with code 0, without marking their work as done
        ended = self.ended_well()
        ranks = {
            worker.global_rank for worker in self.worker_group.workers if worker.local_rank in ended
        }
        return {rank for rank in ranks if not any(self._failures.glob(f"*rank-{rank}.*"))}

    def meet_machines(self, worker_group: WorkerGroup) -> None:
        """Join the other machines, after checking that this one still belongs to the run.

        Raises TimeoutError: the store where they meet does not answer any more.
        """
        group: Any = worker_group  # torch declares its fields as None
        self._membership.check()
        with self._meeting.meeting():
            super().meet_machines(worker_group)
            self._agree_on_restarts(group)
            if isinstance(self._live, LiveHosts):
                ranks = [worker.global_rank for worker in group.workers]
                self._live.meet(group.store, group.group_rank, group.group_world_size, ranks)
        self._membership.begin()
        several = group.group_world_size > 1
        place = group.store, group.group_rank, group.group_world_size
        self._watch.hear_from(OtherMachines(*place) if several else None)

    def _agree_on_restarts(self, group: Any) -> None:
        """Take the restart count of the machine that has counted most.

        The rendezvous uses it, and a machine that joins later starts at zero.
        """
        if group.spec.rdzv_handler.get_backend() == "static":
            return
        mine = group.spec.max_restarts - self.restarts_left
        group.store.set(f"lockstep/attempt/{group.group_rank}", str(mine))
        attempts = [
            int(group.store.get(f"lockstep/attempt/{rank}"))
            for rank in range(group.group_world_size)
        ]
        self.restarts_left = group.spec.max_restarts - max(attempts)

    def run_until_end(self, role: str) -> RunResult:
        result = None
        try:
            result = super().run_until_end(role)
            return result
        finally:
            if result is None or result.state != WorkerState.SUCCEEDED:
                self._publish_end(_FAILED)

    def _publish_end(self, how: str) -> None:
        """Say how this machine's ranks ended.

        A failure waits until those which ended well have read of it.

        This machine may host the store. If it left at once, the others would not learn how it
        ended.
        """
        group: Any = self.worker_group
        if group.store is None:
            return

        def publish() -> None:
            group.store.set(f"{_ENDED}/{group.group_rank}", how)
            if how == _FAILED:
                self._wait_until_seen()

        # the machine that hosts the store is gone, or the link to it
        with suppress(dist.DistError, RuntimeError, TimeoutError):
            answer_within(_ANSWER_SECONDS, publish)

    def wait_for_machines(self) -> None:
        """Wait until the ranks of all machines have ended.

        Torch's version waits 300 s for a machine that failed.
        """
        group: Any = self.worker_group
        self._publish_end(_WELL)
        deadline = time.monotonic() + self.exit_timeout
        try:
            while self.stop_signal is None and time.monotonic() < deadline:
                ended = answer_within(_ANSWER_SECONDS, self._ends)
                self.others_failed = _FAILED in ended.values()
                if self.others_failed or len(ended) == len(self._machines):
                    break
                time.sleep(_POLL_SECONDS)
        except (dist.DistError, RuntimeError, TimeoutError):
            self.others_are_lost = True
            return

        def answer() -> None:
            group.store.set(f"{_SEEN}/{group.group_rank}", "")
            if not self.others_failed:
                self._wait_until_seen()

        with suppress(dist.DistError, RuntimeError, TimeoutError):
            answer_within(_ANSWER_SECONDS, answer)

    def _wait_until_seen(self) -> None:
        """Wait until each machine whose ranks ended well has read how the others ended."""
        deadline = time.monotonic() + CLOSING_SECONDS
        while self.stop_signal is None and time.monotonic() < deadline:
            well = [rank for rank, how in self._ends().items() if how == _WELL]
            if all(self.worker_group.store.check([f"{_SEEN}/{rank}"]) for rank in well):
                return
            time.sleep(_POLL_SECONDS)

    def _ends(self) -> dict[int, str]:
        """Return how the ranks of each machine ended, by the machine's number.

        Machines whose ranks have not ended are missing.
        """
        store = self.worker_group.store
        keys = {machine: f"{_ENDED}/{machine}" for machine in self._machines}
        return {
            machine: store.get(key).decode() for machine, key in keys.items() if store.check([key])
        }

    @property
    def _machines(self) -> list[int]:
        """The numbers of the machines, without those that were lost."""
        lost = self._live.lost_machines if isinstance(self._live, LiveHosts) else set()
        machines = range(self.worker_group.group_world_size)
        return [machine for machine in machines if machine not in lost]

    @property
    def keeps_copies(self) -> bool:
        """Return whether this launcher, of all, saves the newest copy when the launch fails."""
        if isinstance(self._live, LiveHosts):
            return self._live.keeps_copies
        return not self.worker_group.group_rank

    def start_ranks(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start this machine's ranks.

        Signals are blocked until they listen: ranks inherit the mask.
        """
        for worker in worker_group.workers:
            for name in (f"rank-{worker.global_rank}.json", done_mark(worker.global_rank)):
                (self._failures / name).unlink(missing_ok=True)
        if self._live is not None:
            self._live.begin(len(worker_group.workers))
            self._follow(self._live)
        self._hang_found = False
        delete_beats(self._watch.folder)
        self._watch.restart()
        with self._lock:
            self._starting = True
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.ASKS_TO_END)
        try:
            return super().start_ranks(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.ASKS_TO_END)
            with self._lock:
                self._starting = False
                if self.stop_signal is not None:
                    self._forward(self.stop_signal)

    def look_at_ranks(self, worker_group: WorkerGroup) -> RunResult:
        """Check the ranks' processes; end those that hang, and fail if one has left early.

        It waits first, until one ends or it is time for the next look.
        """
        wait_for_an_end(self.pids(), self._seconds_between_looks)
        # Torch's look ends all ranks once it sees a dead one, also one that has died just now. So
        # it looks only where the others can't go on, or all have ended.
        if self._live is not None and self._go_on(self._live):
            result = RunResult(state=WorkerState.HEALTHY)
        else:
            if self._live is not None:
                self._live.give_up()
            result = super().look_at_ranks(worker_group)
        if result.state == WorkerState.HEALTHY:
            pids = {worker.global_rank: int(worker.id) for worker in worker_group.workers}
            world = worker_group.workers[0].world_size
            if self._live is not None:
                spares = {rank: pids[rank] for rank in self._live.world.spares if rank in pids}
                pids = self._live.by_rank(pids)
                world = len(self._live.world.members)
                # the next look finds them dead: nobody has to stop for that
                self._kill(spares[rank] for rank in self._watch.stopped_spares(spares, pids))
            hanging = self._watch.check(pids, world, stop_requested=self.stop_signal is not None)
            # the next look at the processes finds them dead and reads the failure file
            if hanging is not None:
                self._hang_found = True
                if self._live is not None:  # people know the ranks by their first numbers
                    first = self._live.world.members[hanging.rank]
                    all_ranks = worker_group.workers[0].world_size
                    hanging = replace(hanging, rank=first, world_size=all_ranks)
                hanging.write(self._failures)
                self._kill(pids.values())
        if result.state in (WorkerState.HEALTHY, WorkerState.SUCCEEDED) and self._left_early():
            result = RunResult(state=WorkerState.FAILED)
        self._last_result = result
        return result

    def _go_on(self, live: LiveRanks) -> bool:
        """Return whether ranks go on, if need be without those that were killed.

        Raises RunError: no launcher of another machine can say so any more.
        """
        if self.stop_signal is not None or self._hang_found:
            return False
        began = time.monotonic()
        own = {worker.local_rank: worker.global_rank for worker in self.worker_group.workers}
        codes = {own[local]: code for local, code in self.exit_codes().items()}
        failed = frozenset(rank for rank, code in codes.items() if code)
        killed = frozenset(
            rank
            for rank in failed
            if (codes[rank] or 0) < 0 and not (self._failures / f"rank-{rank}.json").exists()
        )
        try:
            goes_on = live.look(Seen(began, failed, killed, None in codes.values()))
        except RunError:
            self._kill(self.pids())
            raise
        world = live.world
        ranks = {*world.members, *world.spares}
        self.forget({local for local, rank in own.items() if rank not in ranks})
        if world.generation != self._generation:
            self._follow(live)
        return goes_on

    def _follow(self, live: LiveRanks) -> None:
        """Watch the ranks of the world that has just begun."""
        self._generation = live.world.generation
        self._watch.follow(live.folder, live.world.members)

    def restart_ranks(self, worker_group: WorkerGroup) -> None:
        """Start the ranks again, unless the run was stopped or its config is wrong."""
        if self.stop_signal is not None:
            raise stopped_by(self.stop_signal)
        if worker_group.state == WorkerState.HEALTHY:  # machines joined or left
            self._on_restart(None, self.restarts_left)
        else:
            cause = first_cause(self.failed(self._last_result))
            if cause is not None and cause.kind == "usage":
                raise cause.error()
            self._loop.check(cause)
            self._on_restart(cause, self.restarts_left)
        super().restart_ranks(worker_group)

    def on_signal(self, number: int) -> None:
        """Forward the signal to the ranks, or exit if there are none yet.

        A second Ctrl-C kills them. The thread that reads signals calls it, because the main thread
        may be waiting for other machines.
        """
        with self._lock:
            running = self.pids()
            if self.stop_signal is not None and number == signal.SIGINT:
                self._kill(running)
                print_error(stopped_by(number))
                signals.end_now(EXIT_FAILED, "")
            if self.stop_signal is not None:
                return  # the ranks know already, and are saving
            if not running and not self._starting:
                self.leave_rendezvous(CLOSING_SECONDS)
                signals.end_now(
                    EXIT_PREEMPTED,
                    f"stopped by {signals.name_of(number)} before ranks were started",
                )
            self.stop_signal = number
            if number == signal.SIGINT:
                os.write(
                    2,
                    b"lockstep: interrupted: the ranks may save and stop; a second Ctrl-C ends them"
                    b" at once\n",
                )
            if not self._starting:
                self._forward(number)

    def _forward(self, number: int) -> None:
        # only to the rank itself: its data workers must live until it has saved
        for pid in self.pids():
            send_signal(pid, _FORWARDED[signal.Signals(number)])

    def _kill(self, pids: Iterable[int]) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def wait_for_failures(failures: Path, seconds: float) -> list[Failure]:
    """Return the failures of all machines that share the folder.

    They are read after a primary failure, or after a timeout.
    """
    deadline = time.monotonic() + seconds
    while True:
        written = read_all(failures)
        cause = first_cause(written)
        if (cause is not None and not cause.consequence) or time.monotonic() > deadline:
            return written
        time.sleep(0.05)


class CrashLoop:
    """Detects that ranks fail repeatedly in the same way, with no checkpoint in between."""

    LIMIT = 3  # equal failures in a row

    def __init__(self, checkpoints: Path, memory: Path | None = None) -> None:
        self._checkpoints = checkpoints  # the run's folder, which need not exist
        self._memory = memory  # where copies of runs lie, each in a folder of its own
        self._seen: tuple[str, int] | None = None
        self._times = 0

    def check(self, cause: Failure | None) -> None:
        """Count one failure. Raises RunError: it is the third equal failure in a row."""
        if cause is None:
            return
        steps = [
            int(p.name[5:])
            for p in self._checkpoints.glob("step-*")
            if re.fullmatch(r"step-\d{8}", p.name)
        ]
        if not steps:  # `checkpoint.storage` keeps them elsewhere: the run's events list the saves
            saves = RunDirectory(self._checkpoints.parent).read_events()
            steps = [event["step"] for event in saves if event["kind"] == "save"]
        if self._memory is not None:
            copies = self._memory.glob("*/step-*")
            steps += [int(p.name[5:]) for p in copies if re.fullmatch(r"step-\d{8}", p.name)]
        seen = (re.sub(r"[\d.]+", "#", cause.what), max(steps, default=0))
        self._times = self._times + 1 if seen == self._seen else 1
        self._seen = seen
        if self._times >= self.LIMIT:
            error = cause.error()
            why = (
                f"{self._times} times in order, with no checkpoint after step {seen[1]} in between:"
                f" starting again does not help{'; ' + error.why if error.why else ''}"
            )
            raise RunError(error.what, where=error.where, why=why, fix=error.fix)
