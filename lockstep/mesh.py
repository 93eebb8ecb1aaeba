"""Builds the device mesh pipeline × replicate × shard, which is passed as an argument and never global."""

from typing import TYPE_CHECKING

from lockstep.collectives import create_once
from lockstep.environment import RankFacts
from lockstep.layout import AXES, Layout
from lockstep.strategy import AUTO, REPLICAS, SINGLE, resolve

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.config import DistributedConfig


def device_mesh(layout: Layout, device_type: str) -> "DeviceMesh":
    """Return the device mesh of a layout, with the axes `AXES`; needs an initialised process group."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = (layout.pipeline, layout.replicate, layout.shard)
    return create_once(("mesh", device_type, sizes), lambda: init_device_mesh(device_type, sizes, mesh_dim_names=AXES))


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
