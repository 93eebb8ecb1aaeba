"""What only becomes clear as wrong once the model, the layout and the device are known."""

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from lockstep.config import Config
from lockstep.errors import UsageError
from lockstep.mesh import Layout


def refuse_impossible(config: Config, layout: Layout, device: torch.device) -> None:
    """Refuse settings that this layout or device can't follow.

    Raises:
        UsageError: with what to write instead.
    """
    dtype, sharded = config.precision.param_dtype, layout.strategy == "fsdp" and layout.world_size > 1
    if dtype != "fp32" and not sharded and layout.strategy != "pipeline":
        raise UsageError(
            f"precision.param_dtype: {dtype} needs strategy fsdp on two ranks or more, and this is {layout}",
            where="precision.param_dtype",
            why="FSDP keeps fp32 shards and casts parameters as it gathers them; elsewhere nothing is gathered",
            fix=f"write precision.mode: {dtype}, which computes in it under every strategy",
        )
    if layout.strategy == "fsdp" and config.distributed.fsdp.cpu_offload and device.type == "cpu":
        raise UsageError(
            "cpu_offload: the device is the CPU, where there is nothing to offload",
            where="distributed.fsdp.cpu_offload",
            fix="write cpu_offload: false",
        )


def refuse_wrapped(model: nn.Module) -> None:
    """A model that is wrapped already would be reduced twice.

    Raises:
        UsageError: with the line to delete.
    """
    if isinstance(model, DistributedDataParallel | DataParallel):
        name = type(model).__name__
        raise UsageError(
            f"the model is already wrapped in {name}",
            why="Lockstep places it, and would synchronise it twice",
            fix=f"delete the line model = {name}(model, …) and pass the model itself",
        )
