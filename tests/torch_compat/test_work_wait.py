"""`lockstep/torch_compat/work_wait.py`: waits for collectives go through the class's method."""

from typing import Any

import torch
import torch.distributed as dist

from lockstep.torch_compat import work_wait
from tests.ranks import run_ranks


def count_waits() -> tuple[int, bool]:
    """Return how many waits were told, and whether the method is as it was in the end."""
    original = dist.Work.wait
    told = []

    def around(wait: work_wait.Wait) -> work_wait.Wait:
        def noted(*args: Any, **kwargs: Any) -> Any:
            told.append(wait)
            return wait(*args, **kwargs)

        return noted

    assert work_wait.available()
    work_wait.replace(around)
    work: Any = dist.all_reduce(torch.ones(1), async_op=True)
    work.wait()
    dist.all_reduce(torch.ones(1))
    work_wait.restore()
    dist.all_reduce(torch.ones(1))
    return len(told), dist.Work.wait is original


def test_a_wait_is_told_while_the_method_is_replaced() -> None:
    assert run_ranks(count_waits, 2) == [(2, True)] * 2
