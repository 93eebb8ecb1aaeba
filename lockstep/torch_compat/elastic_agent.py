"""torch's elastic agent, whose steps a subclass can change.

They are methods without an underscore, called in place of torch's.

Public torch: "Extending the agent" in its documentation says to override these private methods;
there is no other way to start ranks with signals held back, to watch them for hangs, or to count
restarts alike on all machines. Seen to work: torch 2.11.0 to 2.15.0. When gone: importing this file
raises AttributeError for a method; a launch fails at once for an attribute.
"""

import inspect
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from lockstep.store_threads import StoreThread

# from torch 2.12 on
_TAKES_TIMEOUT = "shutdown_timeout" in inspect.signature(LocalElasticAgent.__init__).parameters
OVERRIDDEN = (
    "_rendezvous",
    "_invoke_run",
    "_exit_barrier",
    "_start_workers",
    "_monitor_workers",
    "_restart_workers",
)


class ExtensibleAgent(LocalElasticAgent):
    """An agent whose steps are overridden by public names, under which they are torch's own here.

    Args:
        spec: what to start, and how often to start it again.
        logs_specs: where torch redirects output to.
        shutdown_timeout: seconds that ranks which are asked to end have, before they are killed.
    """

    def __init__(
        self, spec: WorkerSpec, logs_specs: LogsSpecs, *, shutdown_timeout: int = 30
    ) -> None:
        timeout: dict[str, Any] = {"shutdown_timeout": shutdown_timeout} if _TAKES_TIMEOUT else {}
        super().__init__(spec, logs_specs, **timeout)
        self._seconds_to_end = shutdown_timeout

    # waits for the other machines, and assigns global ranks
    meet_machines = LocalElasticAgent._rendezvous
    # until the ranks of all machines have ended
    wait_for_machines = LocalElasticAgent._exit_barrier
    # ends the machine's ranks and starts them anew
    restart_ranks = LocalElasticAgent._restart_workers

    @property
    def worker_group(self) -> Any:
        """The machine's ranks: `workers`, `store`, `group_rank`, `group_world_size`, `spec`."""
        return self._worker_group

    @property
    def restarts_left(self) -> int:
        """Number of restarts of the ranks that are left."""
        return self._remaining_restarts

    @restarts_left.setter
    def restarts_left(self, count: int) -> None:
        self._remaining_restarts = count

    @property
    def exit_timeout(self) -> float:
        """Seconds to wait for other machines once this one's ranks have ended."""
        return self._exit_barrier_timeout

    def pids(self) -> list[int]:
        """Return the processes of the machine's ranks; none before they are started."""
        return list(self._pcontext.pids().values()) if self._pcontext else []

    def ended_well(self) -> set[int]:
        """Return the local ranks whose processes have ended with code 0."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local for local, handler in handlers.items() if handler.proc.poll() == 0}

    def exit_codes(self) -> dict[int, int | None]:
        """Return the exit codes of local ranks that were not forgotten; None: it runs."""
        processes: Any = self._pcontext
        running = getattr(processes, "_running_local_ranks", ())
        handlers = getattr(processes, "subprocess_handlers", {})
        return {local: handlers[local].proc.poll() for local in running}

    def forget(self, local_ranks: set[int]) -> None:
        """Leave these ranks out of what `look_at_ranks` sees: the others go on without them."""
        processes: Any = self._pcontext
        processes._running_local_ranks.difference_update(local_ranks)

    def leave_rendezvous(self, seconds: float) -> None:
        """Tell the other machines that this one leaves, and give up after some seconds."""
        leaving = StoreThread(lambda _thread: self._rdzv_handler.shutdown(), "leave-rendezvous")
        leaving.join(seconds)

    def run_until_end(self, role: str) -> RunResult:
        """Start the ranks, watch them, restart them, and return how they ended."""
        return super()._invoke_run(role)

    def start_ranks(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the machine's ranks; return local rank → process id."""
        started: dict[int, Any] = super()._start_workers(worker_group)
        if not _TAKES_TIMEOUT:  # torch 2.11 closes its processes with a timeout of its own
            processes: Any = self._pcontext
            processes.close = partial(processes.close, timeout=self._seconds_to_end)
        return started

    def look_at_ranks(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the machine's ranks now."""
        return super()._monitor_workers(worker_group)  # type: ignore[no-any-return]

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.meet_machines(worker_group)

    def _invoke_run(self, role: str = "default") -> RunResult:
        return self.run_until_end(role)

    def _exit_barrier(self) -> None:
        self.wait_for_machines()  # type: ignore[no-untyped-call]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        return self.start_ranks(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.look_at_ranks(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.restart_ranks(worker_group)
