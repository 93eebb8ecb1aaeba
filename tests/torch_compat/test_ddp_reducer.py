"""`lockstep/torch_compat/ddp_reducer.py`: DDP measures its backward passes, and finds gradients
that were not sent.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

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
