"""What only becomes clear as wrong once the model, the layout and the device are known."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from lockstep.config import Config
from lockstep.errors import UsageError, listed
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
    wraps = layout.strategy in ("ddp", "accelerate") and layout.world_size > 1
    level = dist.get_debug_level()  # type: ignore[attr-defined]  # torch's stubs lack it
    if wraps and torch.__version__.startswith("2.13.") and level.name == "DETAIL":
        raise UsageError(
            "torch 2.13 dies of a segmentation fault in DistributedDataParallel under TORCH_DISTRIBUTED_DEBUG=DETAIL",
            where="distributed.debug: detail",
            fix="write debug: info; or strategy: fsdp with fsdp.sharding_strategy: no_shard, which replicates as well",
        )


def refuse_parameters(model: nn.Module, layout: Layout, *, reproducible: bool) -> None:
    """Refuse parameters that do not exist yet, and gradients that this layout can't sum.

    Raises:
        UsageError: naming them, with what to write instead.
    """
    if lazy := [name for name, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise UsageError(
            f"{listed(lazy)} has no shape yet: a lazy module makes its parameters at its first forward pass",
            why="they are laid over the ranks before that",
            fix="call the model once before it is handed over: model(*inputs of one batch)",
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(
                f"{name or type(model).__name__} makes sparse gradients",
                why="gradients are summed over micro-batches and ranks, and clipped, as dense tensors",
                fix=f"write {type(module).__name__}(…, sparse=False)",
            )
    sharded = layout.world_size > 1 and (layout.strategy == "fsdp" or layout.shard > 1)
    of_complex = [name for name, parameter in model.named_parameters() if parameter.is_complex()]
    if of_complex and (sharded or reproducible):
        raise UsageError(
            f"the parameter {listed(of_complex)} is complex",
            where="distributed.strategy: fsdp" if sharded else "distributed.reproducible",
            why="gradients are cut and summed there as real numbers",
            fix="keep it real, with a last dim of 2, and take torch.view_as_complex(…) of it in forward; "
            "or write strategy: ddp and reproducible: false",
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
