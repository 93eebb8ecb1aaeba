"""`lockstep/torch_compat/ddp_reducer.py`: DDP measures its backward passes, and finds gradients
that were not sent.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.monitor.meters import watch_ddp
from lockstep.torch_compat import ddp_reducer
from tests.ranks import run_ranks


class Two(nn.Module):
    """Its second layer takes part where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        found: Tensor = self.first(x)
        return found + self.second(x) if both else found


def watch_passes() -> float:
    """Return what the newest complete pass waited; the last pass leaves gradients out."""
    model = DistributedDataParallel(Two())
    ddp_reducer.time_passes(model, 10)
    waited = 0.0
    for _ in range(3):
        model(torch.ones(2, 4), True).sum().backward()
        ddp_reducer.check_of_sent(model)()
        waited = ddp_reducer.wait_seconds(model)
    model(torch.ones(2, 4), False).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        ddp_reducer.check_of_sent(model)()
    return waited


def test_waits_are_measured_and_gradients_that_were_not_sent_are_found() -> None:
    assert max(run_ranks(watch_passes, 2)) > 0


def timed_passes() -> list[int]:
    """Return the numbers of the passes, from 1, of which DDP has measured the wait."""
    model = DistributedDataParallel(Two())
    watch_ddp(model)
    timed = []
    newest = 0.0
    for number in range(1, 42):
        model(torch.ones(2, 4), True).sum().backward()
        took = ddp_reducer.wait_seconds(model)
        if took != newest:
            timed.append(number)
        newest = took
    return timed


def test_on_the_cpu_one_pass_in_ten_is_timed_after_the_first_ten() -> None:
    """All of them were, at 2 % of a step of 1 ms; one in a hundred, torch's rate, tells too little.

    What was measured in a pass is there in the next one.
    """
    for timed in run_ranks(timed_passes, 2):
        assert 2 <= len([number for number in timed if number > 12]) <= 4, timed
