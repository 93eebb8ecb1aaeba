"""Builds the device mesh pipeline × replicate × context × tensor × shard.

The mesh is an argument of functions, and never global.

Ranks along `tensor` are neighbours, for they exchange most, and then those along `context`. In the
mesh `tensor` comes before `shard`, because a parameter is cut over `tensor` first and the piece
over `shard`: the order of a DTensor's placements.

Tests: tests/process_group/test_mesh.py, tests/process_group/test_mesh_groups.py,
tests/parallel/test_debug_detail.py
"""

import math
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lockstep.layout import SAME_BATCH, Layout
from lockstep.process_group.collectives import create_group, create_once, new_group

MESH_AXES = ("pipeline", "replicate", *SAME_BATCH, "shard")


def device_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Return the device mesh of a layout, with the axes `MESH_AXES`.

    Needs an initialised process group.
    """
    return _mesh(layout, device_type, MESH_AXES, layout.replicate, layout.shard)


def replica_group(mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the group of this rank and its replicas; None: it has none."""
    if mesh is None or mesh["replicate"].size() == 1:
        return None
    return mesh["replicate"].get_group()


def expert_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """Return the device mesh with `expert_replicate` × `expert` for replicate × shard.

    The ranks of `expert` are neighbours.
    """
    names = ("pipeline", "expert_replicate", *SAME_BATCH, "expert")
    return _mesh(
        layout, device_type, names, layout.data_parallel_size // layout.expert, layout.expert
    )


def _mesh(
    layout: Layout, device_type: str, names: tuple[str, ...], replicas: int, neighbours: int
) -> DeviceMesh:
    parts = (getattr(layout, axis) for axis in SAME_BATCH)
    sizes = (layout.pipeline, replicas, neighbours, *parts)
    moved = torch.arange(layout.world_size, dtype=torch.int).view(sizes).movedim(2, -1)
    # A fresh copy: axes of one rank else keep the strides that they had, by which DeviceMesh judges
    # the order of axes before torch 2.12.
    ranks = moved.clone(memory_format=torch.contiguous_format)
    return create_once(
        ("mesh", device_type, names, sizes), lambda: _mesh_of(ranks, device_type, names)
    )


def _mesh_of(ranks: torch.Tensor, device_type: str, names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh of these ranks.

    torch creates a group for each axis and each of its rows, waiting for all ranks each time, and
    gloo gives each three threads. Here ranks create only those that they are in, and one for all
    axes of a single rank.
    """
    if getattr(dist.group.WORLD, "bound_device_id", None) is not None:
        # one call splits the communicator along an axis
        return DeviceMesh(device_type, ranks, mesh_dim_names=names)
    own = (ranks == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for axis in range(ranks.ndim):  # the ranks that differ from this one along this axis alone
        members = ranks[
            tuple(
                slice(None) if each == axis else coordinate for each, coordinate in enumerate(own)
            )
        ].tolist()
        group = dist.group.WORLD
        if len(members) < dist.get_world_size() or group is None:
            make = partial(new_group, members, use_local_synchronization=True)
            group = create_once(("along", *members), make)
        groups.append(group)
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=names)


def data_parallel_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Return the group of the ranks that share out micro-batches with this one.

    They hold the same stages, and have the same position along `context` and `tensor`.
    """
    pipeline, replicate, *parts, shard = mesh.shape
    each = replicate * shard
    apart = math.prod(parts)
    firsts = [stage * each * apart + piece for stage in range(pipeline) for piece in range(apart)]
    return create_group("columns", [range(first, first + each * apart, apart) for first in firsts])
