"""Replicas by Hugging Face Accelerate, which wraps the model in DistributedDataParallel.

It works under Lockstep's launcher and under `accelerate launch`, whose other settings (precision,
accumulation) are not read from its environment: the config decides. Its samplers and its
`join_uneven_inputs` are not used.
"""

import os
import warnings
from collections.abc import Iterator
from typing import ClassVar

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import StepConfig
from lockstep.errors import Contradiction, UsageError
from lockstep.layout import Layout
from lockstep.parallel.axes.replicate import ReplicateAxis
from lockstep.parallel.replicas.ddp import ddp_settings
from lockstep.strategy import Strategy

_OTHER_ENGINES = {
    "ACCELERATE_USE_FSDP": "write strategy: fsdp",
    "ACCELERATE_USE_DEEPSPEED": "write strategy: fsdp, which cuts the same state",
    "ACCELERATE_USE_MEGATRON_LM": "write strategy: pipeline",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "write strategy: fsdp or pipeline",
}


class Accelerate(Strategy):
    """A replica on every rank, wrapped by Accelerate."""

    topologies = {"accelerate": ("replicate",)}
    axes = ("lockstep.parallel.replicas.accelerate:AccelerateAxis",)
    equal_bits = False

    def topologies_to_verify(self, config: StepConfig) -> list[str]:
        return ["accelerate:2"]


class AccelerateAxis(ReplicateAxis):
    """Replicas that Accelerate wraps."""

    goes_with: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def contradictions(cls, config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
        yield from super().contradictions(config, layout)
        if config.distributed.ddp.compression.kind == "powersgd":
            what = "PowerSGD keeps state that Accelerate does not save"
            fix = "write strategy: ddp, or kind: none"
            yield Contradiction(
                ("distributed.ddp.compression.kind", "distributed.strategy"), what, fix
            )

    def wrap(
        self, model: nn.Module, config: StepConfig, group: dist.ProcessGroup
    ) -> DistributedDataParallel:
        refuse_other_engines()
        return prepare(model, config)


def prepare(model: nn.Module, config: StepConfig) -> DistributedDataParallel:
    """Hand a model over to Accelerate."""
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
    except ImportError:
        what = "strategy accelerate needs Hugging Face Accelerate, which is not installed"
        fix = "pip install accelerate, or write strategy: ddp"
        raise UsageError(what, where="distributed.strategy", fix=fix) from None
    accelerator = Accelerator(
        cpu=next(model.parameters()).device.type == "cpu",
        device_placement=config.distributed.accelerate.device_placement,
        mixed_precision="no",  # autocast is the step's, as under every strategy
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=1, sync_with_dataloader=False
        ),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False, **ddp_settings(config))
        ],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning
        )
        wrapped = accelerator.prepare_model(model)
    assert isinstance(wrapped, DistributedDataParallel)
    return wrapped


def refuse_other_engines() -> None:
    """Refuse `accelerate launch` with an engine for which Lockstep has its own strategy."""
    for name, fix in _OTHER_ENGINES.items():
        if os.environ.get(name, "false").lower() in ("true", "1"):
            what = f"accelerate launch is set to use another engine ({name}=true)"
            why = "under strategy accelerate, Accelerate synchronises replicas"
            raise UsageError(
                what, where="distributed.strategy", why=why, fix=f"{fix}, or launch without it"
            )
