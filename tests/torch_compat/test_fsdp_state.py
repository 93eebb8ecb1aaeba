"""`lockstep/torch_compat/fsdp_state.py`: an FSDP2 unit has the state whose groups are marked."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lockstep.plan.rehearsal import fake_ranks
from lockstep.torch_compat.fsdp_state import expect_reduction, pass_through


def test_the_groups_of_a_unit_are_found_and_know_the_mark() -> None:
    with fake_ranks(2):
        unit: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        unit(torch.ones(1, 4))
        states = unit._get_fsdp_state()._state_ctx.all_states
        assert len(states) == 1
        if hasattr(unit, "finalize_backward"):  # from torch 2.15 on
            (group,) = states[0]._fsdp_param_groups
            assert hasattr(group, "_post_backward_pending")
            expect_reduction(unit)
            assert group._post_backward_pending


def test_a_unit_sends_its_messages_without_a_forward_pass() -> None:
    with fake_ranks(2):
        unit: Any = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        unit.set_reduce_scatter_unused_params(True)
        unit.register_forward_hook(lambda *_: pytest.fail("it runs"))
        token = torch.zeros(1, requires_grad=True)
        pass_through(unit, token, None).sum().backward()
        assert unit.weight.grad is not None
        assert not unit.weight.grad.to_local().any()
