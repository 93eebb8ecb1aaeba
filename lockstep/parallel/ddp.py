"""DistributedDataParallel: every rank holds the whole model; gradients are averaged once a step, while backward runs.

DDP's built-in reduction is a mean over ranks; the loss is multiplied by their number, which gives the bits of a sum.
Buffers are not broadcast here: what changes them is the same on every rank, or is said to be different.
"""

import inspect
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import DDPConfig


def apply_ddp(model: nn.Module, mesh: DeviceMesh, config: DDPConfig) -> DistributedDataParallel:
    """Wrap a whole model, its values already equal on all ranks, for the replicate axis of `mesh`."""
    device = next(model.parameters()).device
    settings: dict[str, Any] = {"device_ids": [device.index]} if device.type == "cuda" else {}
    # torch 2.13 renamed it; with init_sync off neither touches a buffer, at the start or later.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    settings["forward_sync_buffers" if renamed else "broadcast_buffers"] = False
    if config.bucket_cap_mb is not None:
        settings["bucket_cap_mb"] = config.bucket_cap_mb
    return DistributedDataParallel(
        model,
        process_group=mesh["replicate"].get_group(),
        init_sync=False,
        find_unused_parameters=config.find_unused_parameters,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        static_graph=config.static_graph,
        **settings,
    )


def set_sync(model: DistributedDataParallel, last: bool) -> None:
    """Reduce gradients in the next backward pass, or only accumulate them here: what `no_sync()` does, for one pass."""
    model.require_backward_grad_sync = last
