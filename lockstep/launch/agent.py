"""torch's elastic agent, with Lockstep's manners: signals are passed on and waited for, failures are told once.

`LocalElasticAgent` starts the ranks of one machine, watches them and starts them anew. Changed here: a signal to the
launcher goes to the ranks, which may then take the time they need to save (the agent alone gives them 30 s); a
second one ends them at once; a run that was told to stop, or whose config is wrong, is not restarted.

Source: docs.pytorch.org/docs/stable/elastic/agent.html, "Extending the agent". Loads torch.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from lockstep import signals
from lockstep.errors import EXIT_FAILED, EXIT_PREEMPTED, RunError
from lockstep.heartbeat import forget_beats
from lockstep.launch.failures import Failure, done_mark, first_cause, from_exit_code, read_all
from lockstep.launch.hang import HangWatch
from lockstep.launch.membership import Membership
from lockstep.launch.restarts import CrashLoop
from lockstep.launch.worker import print_error

_CLOSING_SECONDS = 5.0  # for a farewell; a link that is cut would hold it for a minute
_PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,  # schedulers' warning ahead of the end
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,
}


_ENDED = "lockstep/ended"  # in the store of a round: how the ranks of each machine ended
_WELL, _FAILED = "well", "failed"
_LOOK_SECONDS = 0.1


class StoppedBySignalError(Exception):
    """The launcher was told to stop, and the ranks did not end by themselves."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signals.name_of(number))

    def error(self) -> RunError:
        """The one message about it."""
        name = signals.name_of(self.number)
        return RunError(f"stopped by {name}", why="the ranks did not save and leave by themselves")


class Agent(LocalElasticAgent):
    """The agent of one machine.

    Args:
        failures: where the ranks leave `rank-N.json`; emptied of this machine's ranks at each start.
        logs: where their logs are.
        on_restart: called with the failure and the number of restarts left before ranks are started anew.
        watch: finds ranks that hang.
        checkpoints: the run's folder of them, to know whether a run that fails again and again gets anywhere.
        shutdown_timeout: seconds that the peers of a failed rank have to end.
    """

    def __init__(
        self, spec: WorkerSpec, *, failures: Path, logs: Path, on_restart: Callable[[Failure | None, int], None],
        watch: HangWatch, checkpoints: Path, shutdown_timeout: int = 30,
    ) -> None:  # fmt: skip
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull), shutdown_timeout=shutdown_timeout)
        self._failures, self._logs, self._on_restart = failures, logs, on_restart
        self.stop_signal: int | None = None
        self._lock, self._starting = threading.Lock(), False
        self.others_failed = False
        self._watch, self._loop = watch, CrashLoop(checkpoints)
        handler: Any = spec.rdzv_handler
        self._membership = Membership(handler.num_nodes_waiting)
        handler.num_nodes_waiting = self._membership

    def failed(self, result: RunResult) -> list[Failure]:
        """What went wrong with this machine's ranks, files first, exit codes where a rank left none."""
        mine = {worker.global_rank for worker in self._worker_group.workers}
        told = {f.rank: f for f in read_all(self._failures) if f.rank in mine}
        for rank, process in result.failures.items():
            if rank not in told and not self._ended_after_its_work(rank, process.exitcode):
                world = self._worker_group.workers[0].world_size
                # Its clock has whole seconds; rounded up, so that a rank that wrote a file just before comes first.
                log = self._logs / f"rank-{rank}.log"
                told[rank] = from_exit_code(rank, world, process.exitcode, process.timestamp + 1.0, log)
        for rank in self._left_early() - told.keys():
            world = self._worker_group.workers[0].world_size
            told[rank] = from_exit_code(rank, world, 0, time.time(), self._logs / f"rank-{rank}.log")
        return list(told.values())

    def _ended_after_its_work(self, rank: int, code: int) -> bool:
        """Whether the signal that was passed on came to a rank whose work was done, in the interpreter's own end."""
        stop = None if self.stop_signal is None else _PASSED_ON[signal.Signals(self.stop_signal)]
        return stop is not None and code == -stop and (self._failures / done_mark(rank)).exists()

    def _left_early(self) -> set[int]:
        """Ranks that ended with code 0 and never said that their work was done."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        ended = {local for local, handler in handlers.items() if handler.proc.poll() == 0}
        ranks = {worker.global_rank for worker in self._worker_group.workers if worker.local_rank in ended}
        return {rank for rank in ranks if not any(self._failures.glob(f"*rank-{rank}.*"))}

    def pids(self) -> list[int]:
        return list(self._pcontext.pids().values()) if self._pcontext else []

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        group: Any = worker_group  # whose fields the library declares as None
        self._membership.check()
        super()._rendezvous(worker_group)
        self._membership.begin()
        if group.spec.rdzv_handler.get_backend() != "static":
            self._count_alike(group)

    def _count_alike(self, group: Any) -> None:
        """Agree on the number of restarts: ranks meet under it, and a machine that comes later has counted none."""
        attempts = []
        mine = group.spec.max_restarts - self._remaining_restarts
        group.store.set(f"lockstep/attempt/{group.group_rank}", str(mine))
        for rank in range(group.group_world_size):
            attempts.append(int(group.store.get(f"lockstep/attempt/{rank}")))
        self._remaining_restarts = group.spec.max_restarts - max(attempts)

    def _invoke_run(self, role: str = "default") -> RunResult:
        """Run until this machine's ranks have ended; where they did not end well, the other machines hear of it."""
        try:
            result: RunResult = super()._invoke_run(role)
        except BaseException:
            self._tell_end(_FAILED)
            raise
        if result.state != WorkerState.SUCCEEDED:
            self._tell_end(_FAILED)
        return result

    def _tell_end(self, how: str) -> None:
        group: Any = self._worker_group
        if group.store is not None:
            with suppress(dist.DistError, RuntimeError):  # the machine that hosts the store has gone
                group.store.set(f"{_ENDED}/{group.group_rank}", how)

    def _exit_barrier(self) -> None:
        """Wait until the ranks of all machines have ended, for so long at most as the agent's timeout says.

        In the library's own, a machine whose ranks failed never arrives, and the others wait for it for 300 s.
        """
        group: Any = self._worker_group
        self._tell_end(_WELL)
        keys = [f"{_ENDED}/{rank}" for rank in range(group.group_world_size)]
        deadline = time.monotonic() + self._exit_barrier_timeout
        with suppress(dist.DistError, RuntimeError):  # the machine that hosts the store has seen all and has gone
            while self.stop_signal is None and time.monotonic() < deadline:
                ended = [group.store.get(key).decode() for key in keys if group.store.check([key])]
                self.others_failed = _FAILED in ended
                if self.others_failed or len(ended) == len(keys):
                    return
                time.sleep(_LOOK_SECONDS)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for worker in worker_group.workers:
            for name in (f"rank-{worker.global_rank}.json", done_mark(worker.global_rank)):
                (self._failures / name).unlink(missing_ok=True)
        forget_beats(self._watch.folder)
        self._watch.restart()
        return self._start_with_signals_held_back(worker_group)

    def _start_with_signals_held_back(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Ranks inherit that signals wait, until they listen: one that comes before would end them unheard."""
        with self._lock:
            self._starting = True
        signal.pthread_sigmask(signal.SIG_BLOCK, signals.ASKS_TO_END)
        try:
            started: dict[int, Any] = super()._start_workers(worker_group)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.ASKS_TO_END)
            with self._lock:
                self._starting = False
                if self.stop_signal is not None:
                    self._pass_on(self.stop_signal)
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            self._end_if_hanging(worker_group)
        if result.state in (WorkerState.HEALTHY, WorkerState.SUCCEEDED) and self._left_early():
            result = RunResult(state=WorkerState.FAILED)
        self._last_result = result
        return result

    def _end_if_hanging(self, worker_group: WorkerGroup) -> None:
        """The next look at the processes will find them dead, and the failure that is written here."""
        pids = {worker.global_rank: int(worker.id) for worker in worker_group.workers}
        world = worker_group.workers[0].world_size
        hanging = self._watch.look(pids, world, told_to_stop=self.stop_signal is not None)
        if hanging is not None:
            hanging.write(self._failures)
            for pid in pids.values():
                _send(pid, signal.SIGKILL, group=True)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.stop_signal is not None:
            raise StoppedBySignalError(self.stop_signal)
        if worker_group.state == WorkerState.HEALTHY:  # machines came or went
            self._on_restart(None, self._remaining_restarts)
        else:
            cause = first_cause(self.failed(self._last_result))
            if cause is not None and cause.kind == "usage":
                raise cause.error()
            self._loop.check(cause)
            self._on_restart(cause, self._remaining_restarts)
        super()._restart_workers(worker_group)

    def on_signal(self, number: int) -> None:
        """Pass the signal on to the ranks. One before there are ranks ends everything, and so does a second Ctrl-C.

        Called from the thread that reads signals: the main thread may wait for other machines.
        """
        with self._lock:
            running = self.pids()
            if self.stop_signal is not None and number == signal.SIGINT:
                for pid in running:
                    _send(pid, signal.SIGKILL, group=True)
                print_error(StoppedBySignalError(number).error())
                signals.end_now(EXIT_FAILED, "")
            if self.stop_signal is not None:
                return  # they were told, and are saving
            if not running and not self._starting:
                leave_the_others(self)
                signals.end_now(EXIT_PREEMPTED, f"stopped by {signals.name_of(number)} before ranks were started")
            self.stop_signal = number
            if number == signal.SIGINT:
                os.write(2, b"lockstep: interrupted: the ranks may save and stop; a second Ctrl-C ends them at once\n")
            if not self._starting:
                self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        for pid in self.pids():
            # To the rank alone: its data workers must live until it has saved.
            _send(pid, _PASSED_ON[signal.Signals(number)])


def leave_the_others(agent: Agent) -> None:
    """Tell the other machines that this one is done, where they can be reached."""
    closing = threading.Thread(target=agent._rdzv_handler.shutdown, daemon=True)
    closing.start()
    closing.join(_CLOSING_SECONDS)


def _send(pid: int, number: int, *, group: bool = False) -> None:
    with suppress(ProcessLookupError):  # it has ended since
        (os.killpg if group else os.kill)(pid, number)


def quiet_library() -> None:
    """The library logs a banner for each failed rank; Lockstep prints one message instead."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)


def wait_for_files(failures: Path, seconds: float) -> list[Failure]:
    """All machines' failures, where the folder is shared, once one that is no consequence has come or time is up."""
    deadline = time.monotonic() + seconds
    while True:
        found = read_all(failures)
        cause = first_cause(found)
        if (cause is not None and not cause.consequence) or time.monotonic() > deadline:
            return found
        time.sleep(0.05)
