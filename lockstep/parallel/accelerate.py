"""Replicas by Hugging Face Accelerate, which wraps the model and synchronises its gradients.

On several processes Accelerate wraps the model in DistributedDataParallel, under its own state, which finds the process
group that exists. It works under Lockstep's launcher and under `accelerate launch`, whose other settings (precision,
accumulation) are not read from its environment: the config decides. Accelerate's samplers, which repeat samples to
fill a batch, and its `join_uneven_inputs` are not used: a rank that lacks a micro-batch runs a dummy.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import StepConfig
from lockstep.errors import Contradiction, UsageError
from lockstep.layout import Layout
from lockstep.parallel.ddp import Replicas
from lockstep.parallel.micro_step import AroundMicroBatch, MicroBatchPass
from lockstep.parallel.parallel_model import ParallelModel, assign_contiguous
from lockstep.parallel.placement import AppliedStrategy, PlacementContext, placed_in_order, shared_out

_OTHER_ENGINES = {
    "ACCELERATE_USE_FSDP": "write strategy: fsdp",
    "ACCELERATE_USE_DEEPSPEED": "write strategy: fsdp, which cuts the same state",
    "ACCELERATE_USE_MEGATRON_LM": "write strategy: pipeline",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "write strategy: fsdp or pipeline",
}


class Accelerate(Replicas):
    """A replica on every rank, wrapped by Accelerate."""

    topologies = {"accelerate": ("replicate",)}
    equal_bits = False

    def contradictions(
        self, config: StepConfig, layout: Layout | None = None, device_type: str | None = None
    ) -> Iterator[Contradiction]:
        yield from super().contradictions(config, layout)
        if config.distributed.ddp.compression.kind == "powersgd":
            yield Contradiction(
                ("distributed.ddp.compression.kind", "distributed.strategy"),
                "PowerSGD keeps state that Accelerate does not save",
                "write strategy: ddp, or kind: none",
            )

    def topologies_to_verify(self, config: StepConfig) -> list[str]:
        return ["accelerate:2"]

    def place(self, placement: PlacementContext) -> ParallelModel:
        p = placement
        p.materialise()
        compression = p.compress()
        prepared = prepare(p.model, p.config, p.device, compression.hook)
        applied = AppliedStrategy(
            shared_out(assign_contiguous, p),
            runs=prepared.model,
            gradient_sync=prepared,
            multiplier=float(p.ranks),
            compression=compression,
        )
        return placed_in_order(p, applied)


@dataclass
class AcceleratedModel(AroundMicroBatch):
    """A model as Accelerate runs it."""

    model: DistributedDataParallel  # wrapped
    no_sync: Callable[[], AbstractContextManager[Any]]  # Accelerate's context in which backward passes only accumulate
    _open: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self._learns = self.model.static_graph  # in the first backward pass of all, which has to synchronise

    def before(self, run: MicroBatchPass) -> None:
        if not run.last and not self._learns:
            self._open.enter_context(self.no_sync())
        self._learns = False

    def after(self, run: MicroBatchPass) -> None:
        self._open.close()


def prepare(model: nn.Module, config: StepConfig, device: torch.device, hook: Any = None) -> AcceleratedModel:
    """Hand a model over to Accelerate, whole, its values already equal on all ranks; `hook` is for DDP."""
    refuse_other_engines()
    try:
        from accelerate import Accelerator
        from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
    except ImportError:
        raise UsageError(
            "strategy accelerate needs Hugging Face Accelerate, which is not installed",
            where="distributed.strategy",
            fix="pip install 'lockstep-train[accelerate]', or write strategy: ddp",
        ) from None
    ddp = config.distributed.ddp
    accelerator = Accelerator(
        cpu=device.type == "cpu",
        device_placement=config.distributed.accelerate.device_placement,
        mixed_precision="no",  # autocast is the step's, as under every strategy
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1, sync_with_dataloader=False),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                broadcast_buffers=False,
                bucket_cap_mb=ddp.bucket_cap_mb,
                find_unused_parameters=ddp.find_unused_parameters,
                gradient_as_bucket_view=ddp.gradient_as_bucket_view,
                static_graph=ddp.static_graph,
            )
        ],
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
        wrapped = accelerator.prepare_model(model)
    assert isinstance(wrapped, DistributedDataParallel)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    return AcceleratedModel(wrapped, lambda: accelerator.no_sync(wrapped))


def refuse_other_engines() -> None:
    """Refuse `accelerate launch` with an engine for which Lockstep has its own strategy."""
    for name, fix in _OTHER_ENGINES.items():
        if os.environ.get(name, "false").lower() in ("true", "1"):
            raise UsageError(
                f"accelerate launch is set to use another engine ({name}=true)",
                where="distributed.strategy",
                why="under strategy accelerate, Accelerate synchronises replicas",
                fix=f"{fix}, or launch without it",
            )
