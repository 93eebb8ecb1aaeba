"""`lockstep/torch_compat/group_options.py`: what a group was made with can be read."""

import datetime

import pytest
import torch
import torch.distributed as dist

from lockstep.torch_compat.group_options import checks_collectives, timeout_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("level", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])
def test_a_group_says_what_it_was_made_with(level: dist.DebugLevel) -> None:
    before = dist.get_debug_level()
    dist.set_debug_level(level)
    try:
        timeout = datetime.timedelta(seconds=55)
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
        )
        assert timeout_of(dist.group.WORLD, CPU) == 55.0
        assert checks_collectives(dist.group.WORLD, CPU) == (level == dist.DebugLevel.DETAIL)
        assert timeout_of(dist.group.WORLD, torch.device("meta")) is None
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(before)
