"""Builds the device mesh pipeline × replicate × context × tensor × shard, an argument of functions and never global.

Ranks along `tensor` are neighbours, for they exchange most, and then those along `context`. In the mesh `tensor` comes
before `shard`, because a parameter is cut over `tensor` first and the piece over `shard`: the order of a DTensor's
placements.
"""

from typing import TYPE_CHECKING

from lockstep.collectives import create_once
from lockstep.environment import RankFacts
from lockstep.layout import Layout
from lockstep.strategy import AUTO, REPLICAS, SINGLE, resolve

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.config import DistributedConfig

MESH_AXES = ("pipeline", "replicate", "context", "tensor", "shard")


def device_mesh(layout: Layout, device_type: str) -> "DeviceMesh":
    """Return the device mesh of a layout, with the axes `MESH_AXES`; needs an initialised process group."""
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    sizes = (layout.pipeline, layout.replicate, layout.shard, layout.context, layout.tensor)
    ranks = torch.arange(layout.world_size, dtype=torch.int).view(sizes).movedim(2, 4)
    return create_once(("mesh", device_type, sizes), lambda: DeviceMesh(device_type, ranks, mesh_dim_names=MESH_AXES))


def expert_mesh(layout: Layout, device_type: str) -> "DeviceMesh":
    """Return the device mesh in which `expert_replicate` × `expert` stand for replicate × shard.

    Neighbours share out experts. `tensor` comes before `expert`, because it cuts first.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    replicas = layout.data_parallel_size // layout.expert
    sizes = (layout.pipeline, replicas, layout.expert, layout.context, layout.tensor)
    ranks = torch.arange(layout.world_size, dtype=torch.int).view(sizes).movedim(2, 4)
    names = ("pipeline", "expert_replicate", "context", "tensor", "expert")
    return create_once(("experts", device_type, sizes), lambda: DeviceMesh(device_type, ranks, mesh_dim_names=names))


def data_parallel_group(mesh: "DeviceMesh") -> "ProcessGroup | None":
    """Return the group of the ranks that share out micro-batches and hold the same stages and pieces as this one."""
    from functools import partial

    import torch.distributed as dist

    mine = None
    pipeline, replicate, context, tensor, shard = mesh.shape
    each, apart = replicate * shard, context * tensor
    for first in (stage * each * apart + piece for stage in range(pipeline) for piece in range(apart)):
        ranks = list(range(first, first + each * apart, apart))  # every rank makes every group
        made = create_once(("columns", *ranks), partial(dist.new_group, ranks))
        if dist.get_rank() in ranks:
            mine = made
    return mine


def layout_of(config: "DistributedConfig", facts: RankFacts) -> Layout:
    """Return the layout that the config names for the running ranks; `auto` in Python means replicas."""
    if config.strategy == AUTO:
        config = config.model_copy(update={"strategy": REPLICAS if facts.world_size > 1 else SINGLE})
    return resolve(config, facts.world_size, facts.local_world_size)


def local_chunk(full: "torch.Tensor", dim: int, size: int, coordinate: int) -> "torch.Tensor":
    """Return the shard of `full` that FSDP2 gives to `coordinate` of `size` ranks: `torch.chunk` along `dim`."""
    chunks = full.chunk(size, dim)
    if coordinate < len(chunks):
        return chunks[coordinate]
    return full.narrow(dim, 0, 0)
