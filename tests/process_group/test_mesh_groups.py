"""A mesh's groups: each rank makes those that it is in, and one for all axes along which it is
alone.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config import config_from
from lockstep.process_group.mesh import MESH_AXES, device_mesh, expert_mesh
from lockstep.strategy import parse_topology, resolve
from tests.ranks import run_ranks


def groups_of(topology: str) -> dict[str, Any]:
    """Of one mesh: the ranks along each axis, the sum of ranks over it, and the threads that its
    groups started.
    """
    values, _ = parse_topology(topology)
    layout = resolve(
        config_from({f"distributed.{key}": value for key, value in values.items()}).distributed, 4
    )
    threads = len(os.listdir("/proc/self/task"))
    mesh = device_mesh(layout, "cpu")
    started = len(os.listdir("/proc/self/task")) - threads
    assert device_mesh(layout, "cpu") is mesh
    ranks = {}
    sums = {}
    for axis in MESH_AXES:
        group = mesh[axis].get_group()
        total = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(total, group=group)
        ranks[axis] = dist.get_process_group_ranks(group)
        sums[axis] = float(total)
    experts = expert_mesh(layout, "cpu")["expert"].get_group() if layout.expert > 1 else None
    return {"ranks": ranks, "sums": sums, "threads": started, "expert": experts and experts.size()}


def all_groups() -> list[dict[str, Any]]:
    return [
        groups_of(topology)
        for topology in ("ddp:4", "fsdp:2*tensor:2", "pipeline:2*ddp:2", "ddp:4*expert:2")
    ]


def test_a_rank_makes_the_groups_that_it_is_in() -> None:
    for rank, (replicas, cut, stages, experts) in enumerate(run_ranks(all_groups, 4)):
        assert replicas["ranks"] == {
            axis: [0, 1, 2, 3] if axis == "replicate" else [rank] for axis in MESH_AXES
        }
        assert cut["ranks"]["tensor"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert cut["ranks"]["shard"] == [rank % 2, rank % 2 + 2]
        assert stages["ranks"]["pipeline"] == [rank % 2, rank % 2 + 2]
        assert stages["ranks"]["replicate"] == [rank // 2 * 2, rank // 2 * 2 + 1]
        for found in (replicas, cut, stages):
            assert found["sums"] == {
                axis: float(sum(members)) for axis, members in found["ranks"].items()
            }
        # Three threads for each group of gloo: of one rank; then of two axes; then none, for all
        # are there.
        assert [found["threads"] for found in (replicas, cut, stages)] == [3, 6, 0]
        assert experts["expert"] == 2
