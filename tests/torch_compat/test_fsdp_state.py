"""`lockstep/torch_compat/fsdp_state.py`: an FSDP2 unit has the state whose groups are marked."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lockstep.plan.rehearsal import fake_ranks
from lockstep.torch_compat.fsdp_state import pass_through, reduce_gradients


def test_gradients_of_a_unit_are_reduced_when_it_is_said() -> None:
    with fake_ranks(2):
        unit: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        unit.set_is_last_backward(False)
        unit.set_requires_gradient_sync(False)
        unit(torch.ones(1, 4)).sum().backward()
        assert unit.weight.grad is None
        reduce_gradients(unit, begun=True)
        assert unit.weight.grad is not None


def test_a_unit_sends_its_messages_without_a_forward_pass() -> None:
    with fake_ranks(2):
        unit: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        if not hasattr(unit, "set_reduce_scatter_unused_params"):
            pytest.skip("this torch does not reduce what has no gradient, and units are not joined")
        unit.set_reduce_scatter_unused_params(True)
        unit.register_forward_hook(lambda *_: pytest.fail("it runs"))
        token = torch.zeros(1, requires_grad=True)
        pass_through(unit, token, None).sum().backward()
        assert unit.weight.grad is not None
        assert not unit.weight.grad.to_local().any()
