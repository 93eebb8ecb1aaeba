"""`lockstep/torch_compat/rank_processes.py`: torch's agent starts ranks by the function it got."""

import sys
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from lockstep.torch_compat.rank_processes import started_by


class Ended:
    """Stands for a process that has ended well."""

    pid = 2**30
    returncode = 0

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0


def test_ranks_are_started_by_the_function_and_later_by_torch_again(tmp_path: Path) -> None:
    asked: list[Any] = []

    def start(command: Any, environment: Any, stdout: Any, stderr: Any) -> Ended:
        asked.append((list(command), environment["RANK"], stdout, stderr))
        return Ended()

    def run() -> None:
        context = start_processes(
            name="rank",
            entrypoint=sys.executable,
            args=dict.fromkeys(range(2), ("-c", "pass")),
            envs={rank: {"RANK": str(rank)} for rank in range(2)},
            logs_specs=DefaultLogsSpecs(log_dir=str(tmp_path)),
        )
        result = context.wait(30)
        assert result is not None
        assert not result.failures

    with started_by(start):
        run()
    expected = [([sys.executable, "-c", "pass"], str(rank), None, None) for rank in range(2)]
    assert asked == expected
    run()
    assert asked == expected
