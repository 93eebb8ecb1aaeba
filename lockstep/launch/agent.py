"""torch's elastic agent, with Lockstep's manners: signals are passed on and waited for, failures are told once.

`LocalElasticAgent` starts the ranks of one machine, watches them and starts them anew. Changed here: a signal to the
launcher goes to the ranks, which may then take the time they need to save (the agent alone gives them 30 s); a
second one ends them at once; a run that was told to stop, or whose config is wrong, is not restarted; ranks that are
started anew meet in a new store, or they would read the addresses that dead ranks left in the old one.

Source: docs.pytorch.org/docs/stable/elastic/agent.html, "Extending the agent". Loads torch.
"""

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from lockstep.launch.failures import Failure, first_cause, from_exit_code, read_all

PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGUSR1: signal.SIGUSR1,  # schedulers' warning ahead of the end
    signal.SIGINT: signal.SIGINT,
    signal.SIGHUP: signal.SIGTERM,
}


class StoppedBySignalError(Exception):
    """The launcher was told to stop, and the ranks did not end by themselves."""

    def __init__(self, number: int) -> None:
        self.name = signal.Signals(number).name
        super().__init__(self.name)


class Agent(LocalElasticAgent):
    """The agent of one machine.

    Args:
        failures: where the ranks leave `rank-N.json`; emptied of this machine's ranks at each start.
        logs: where their logs are.
        on_restart: called with the failure and the number of restarts left before ranks are started anew.
    """

    def __init__(
        self, spec: WorkerSpec, *, failures: Path, logs: Path, on_restart: Callable[[Failure | None, int], None]
    ) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self._failures, self._logs, self._on_restart = failures, logs, on_restart
        self.stop_signal: int | None = None
        self._met_before = False

    def failed(self, result: RunResult) -> list[Failure]:
        """What went wrong with this machine's ranks, files first, exit codes where a rank left none."""
        mine = {worker.global_rank for worker in self._worker_group.workers}
        told = {f.rank: f for f in read_all(self._failures) if f.rank in mine}
        for rank, process in result.failures.items():
            if rank not in told:
                world = self._worker_group.workers[0].world_size
                # Its clock has whole seconds; rounded up, so that a rank that wrote a file just before comes first.
                log = self._logs / f"rank-{rank}.log"
                told[rank] = from_exit_code(rank, world, process.exitcode, process.timestamp + 1.0, log)
        return list(told.values())

    def pids(self) -> list[int]:
        return list(self._pcontext.pids().values()) if self._pcontext else []

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        group: Any = worker_group  # whose fields the library declares as None
        attempt = group.spec.max_restarts - self._remaining_restarts
        # The dynamic rendezvous has a store of its own for each round; the static one has one for all.
        round_name = f"lockstep/{attempt}" if group.spec.rdzv_handler.get_backend() == "static" else "lockstep"
        if group.group_rank == 0:
            if self._met_before:
                self._fresh = TCPStore(group.master_addr, 0, is_master=True, wait_for_workers=False)
                group.master_port = self._fresh.port
            group.store.set(round_name, f"{group.master_addr} {group.master_port}")
        address, port = group.store.get(round_name).decode().split()
        group.master_addr, group.master_port = address, int(port)
        self._met_before = True

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        for worker in worker_group.workers:
            (self._failures / f"rank-{worker.global_rank}.json").unlink(missing_ok=True)
        with self.signals_kept():
            return super()._start_workers(worker_group)  # type: ignore[no-any-return]

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        self._last_result = result
        return result

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self.stop_signal is not None:
            raise StoppedBySignalError(self.stop_signal)
        if worker_group.state == WorkerState.HEALTHY:  # machines came or went
            self._on_restart(None, self._remaining_restarts)
        else:
            cause = first_cause(self.failed(self._last_result))
            if cause is not None and cause.kind == "usage":
                raise cause.error()
            self._on_restart(cause, self._remaining_restarts)
        super()._restart_workers(worker_group)

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Pass the signal on to the ranks; a second one, or one before there are ranks, ends everything."""
        running = self.pids()
        if self.stop_signal is not None or not running:
            for pid in running:
                _send(pid, signal.SIGKILL, group=True)
            self.stop_signal = number
            raise StoppedBySignalError(number)
        self.stop_signal = number
        for pid in running:
            # To the rank alone: its data workers must live until it has saved.
            _send(pid, PASSED_ON[signal.Signals(number)])

    @contextmanager
    def signals_kept(self) -> Iterator[None]:
        """The library installs handlers of its own when it starts processes; these stay."""
        yield
        for number in PASSED_ON:
            signal.signal(number, self.on_signal)


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
