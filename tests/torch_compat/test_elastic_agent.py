"""`lockstep/torch_compat/elastic_agent.py`: torch's agent calls each method that is overridden."""

import inspect
import os
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import create_rdzv_handler

from lockstep.torch_compat.elastic_agent import OVERRIDDEN, ExtensibleAgent
from tests.ranks import free_port


class Noting(ExtensibleAgent):
    """Notes which steps torch calls."""

    def __init__(self, spec: WorkerSpec, shutdown_timeout: int) -> None:
        super().__init__(
            spec, DefaultLogsSpecs(log_dir=os.devnull), shutdown_timeout=shutdown_timeout
        )
        self.steps: list[str] = []

    def meet_machines(self, worker_group: WorkerGroup) -> None:
        self.steps.append("meet")
        super().meet_machines(worker_group)

    def run_until_end(self, role: str) -> RunResult:
        self.steps.append("run")
        return super().run_until_end(role)

    def wait_for_machines(self) -> None:
        self.steps.append("wait")
        self.worker_group.store.set("over", "yes")
        assert self.exit_timeout > 0

    def start_ranks(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.steps.append("start")
        return super().start_ranks(worker_group)

    def look_at_ranks(self, worker_group: WorkerGroup) -> RunResult:
        result = super().look_at_ranks(worker_group)
        self.steps += [] if result.state == WorkerState.HEALTHY else ["end"]
        return result

    def restart_ranks(self, worker_group: WorkerGroup) -> None:
        self.steps.append("restart")
        super().restart_ranks(worker_group)


def agent(program: str, arguments: tuple[str, ...], shutdown_timeout: int = 30) -> Noting:
    parameters = RendezvousParameters(
        "static", f"127.0.0.1:{free_port()}", "run", 1, 1, rank=0, timeout=30
    )
    handler = create_rdzv_handler(parameters)
    spec = WorkerSpec(
        "default",
        1,
        handler,
        entrypoint=program,
        args=arguments,
        max_restarts=1,
        monitor_interval=0.05,
    )
    return Noting(spec, shutdown_timeout)


def test_torch_calls_every_step(tmp_path: Path) -> None:
    once = f"test -e {tmp_path}/mark || {{ touch {tmp_path}/mark; exit 3; }}"
    noting = agent("/bin/sh", ("-c", once))
    assert noting.pids() == []
    result = noting.run()
    assert result.state == WorkerState.SUCCEEDED
    assert noting.steps == [
        "run",
        "meet",
        "start",
        "end",
        "restart",
        "meet",
        "start",
        "end",
        "wait",
    ]
    assert noting.restarts_left == 0
    assert noting.worker_group.workers[0].global_rank == 0
    noting.leave_rendezvous(5.0)


def test_ranks_that_do_not_end_are_killed_after_the_timeout(tmp_path: Path) -> None:
    deaf = f"trap '' TERM; touch {tmp_path}/deaf; while true; do sleep 0.1; done"
    noting = agent("/bin/sh", ("-c", deaf), shutdown_timeout=1)

    def stop_when_deaf() -> None:
        while not (tmp_path / "deaf").exists():
            time.sleep(0.05)
        raise RuntimeError("enough")

    noting.look_at_ranks = lambda group: stop_when_deaf()
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="enough"):
        noting.run()
    assert 1 <= time.monotonic() - began < 25, "torch's own timeout is 30 s"


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_torch_calls_each_overridden_method_by_its_name(name: str) -> None:
    source = inspect.getsource(SimpleElasticAgent) + inspect.getsource(LocalElasticAgent)
    assert f"self.{name}(" in source
