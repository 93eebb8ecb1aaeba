"""`lockstep/torch_compat/group_creation.py`: every group is made by the function that is given."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lockstep.torch_compat import group_creation
from tests.ranks import run_ranks


def count_groups() -> list[int]:
    """Return how many groups were seen after each way to make some."""
    made = []

    def noted(make: Callable[[], Any]) -> Any:
        made.append(1)
        return make()

    group_creation.make_each_by(noted)
    counts = []
    dist.new_group([0, 1])
    counts.append(len(made))
    init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    counts.append(len(made))
    group_creation.restore()
    dist.new_group([0, 1])
    counts.append(len(made))
    return counts


def test_groups_are_seen_until_it_is_restored() -> None:
    for first, with_mesh, after in run_ranks(count_groups, 2):
        assert first == 1
        assert with_mesh > first
        assert after == with_mesh
