"""The strategy `ddp`, and torch's DistributedDataParallel: every rank holds the whole model.

Gradients are averaged once a step, while backward runs.

DDP's built-in reduction is a mean over ranks; the loss is multiplied by their number, which gives
the bits of a sum. Buffers are not broadcast here: `lockstep.parallel.forward_effects.buffers` keeps
them equal.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.config import StepConfig
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import ModelSize
from lockstep.errors import RunError, UsageError, first_line, listed
from lockstep.monitor.meters import watch_ddp
from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.parallel.loss_accumulator import CarriedFigures
from lockstep.registry import STRATEGIES
from lockstep.strategy import Strategy
from lockstep.torch_compat.ddp_reducer import check_of_sent

# torch 2.13 renames the switch that leaves buffers alone; the old name warns there.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS_STAY: dict[str, Any] = {
    "forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False
}
_FIGURES = "lockstep_figures"  # name of a module while DDP looks for parameters


class DDP(Strategy):
    """Replicas whose gradients are reduced by DDP, by a compression, or up the tree."""

    topologies = {"ddp": ("replicate",)}
    axes = ("replicate",)

    def layouts_to_plan(
        self, model: ModelSize, config: StepConfig, cluster: GpuCluster
    ) -> Iterator[dict[str, Any]]:
        if cluster.num_gpus > 1:
            yield {STRATEGIES.where: self.name}


def wrapped_by_ddp(
    model: nn.Module,
    config: StepConfig,
    group: dist.ProcessGroup,
    figures: CarriedFigures | None = None,
) -> DistributedDataParallel:
    """Wrap a model, whose values are equal on all ranks, with the options of the config.

    `figures` are reduced with the model's gradients; the model does not keep them.
    """
    device = next(model.parameters()).device
    settings = ddp_settings(config) | _BUFFERS_STAY
    if device.type != "cpu":
        settings["device_ids"] = [device.index]
    if figures is not None:
        model.add_module(_FIGURES, figures)  # the last one: other parameters keep their numbers
    try:
        wrapped = DistributedDataParallel(model, process_group=group, init_sync=False, **settings)
    finally:
        if figures is not None:
            delattr(model, _FIGURES)
    watch_ddp(wrapped)
    return wrapped


def ddp_settings(config: StepConfig) -> dict[str, Any]:
    """Return the options of torch's DDP that the config sets."""
    names = ("bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view", "static_graph")
    return {name: getattr(config.distributed.ddp, name) for name in names}


class DDPSync(AroundMicroBatch):
    """The switch of `no_sync()`: backward passes reduce gradients (`last`) or accumulate them.

    With a static graph DDP fails if the very first backward pass does not reduce. So that one
    reduces, too: gradients that are reduced twice are the same on all ranks, and their mean does
    not change them.

    A parameter without a gradient keeps its bucket from being sent, which DDP itself reports only
    in the next step's forward pass, by number at best.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        self._learns = model.static_graph
        self._check_all_sent = check_of_sent(model)
        self._names = [
            name for name, parameter in model.module.named_parameters() if parameter.requires_grad
        ]

    def before(self, passing: MicroBatchPass) -> None:
        self._model.require_backward_grad_sync = passing.last or self._learns
        self._learns = False

    def failed(self, error: BaseException) -> Exception | None:
        """Explain DDP's error that a parameter gets several gradients in a backward pass."""
        if not isinstance(error, RuntimeError) or "mark a variable ready only once" not in str(
            error
        ):
            return None
        match = re.search(r"Parameter at index (\d+)", str(error))
        name = "a parameter" if match is None else f"the parameter {self._names[int(match[1])]}"
        what = f"{name} gets its gradient more than once in one backward pass"
        why = (
            "each call of a reentrant checkpoint has a backward pass of its own, and DDP waits for"
            " one gradient"
        )
        fix = (
            "write checkpoint(…, use_reentrant=False); transformers takes it in"
            ' gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant":'
            " False}); or write strategy: fsdp"
        )
        return UsageError(what, where="the model's forward pass", why=why, fix=fix)

    def after(self, passing: MicroBatchPass) -> None:
        """Raise an error that names the parameters for whose gradients DDP waits."""
        model = self._model
        if (
            not model.require_backward_grad_sync
            or model.find_unused_parameters
            or model.static_graph
        ):
            return
        try:
            self._check_all_sent()
        except RuntimeError as error:
            numbers = re.search(r"did not receive grad for rank \d+: ([\d ,]+)", str(error))
            if numbers is None:
                why = first_line(error)
                raise RunError("DDP did not finish reducing the gradients", why=why) from None
            missing = [self._names[int(number)] for number in re.findall(r"\d+", numbers[1])]
            what = (
                f"{len(missing)} parameter(s) got no gradient in the last micro-batch of the step:"
                f" {listed(missing, 8)}"
            )
            why = "the loss does not depend on them, so DDP waits for their gradients in vain"
            fix = (
                "set distributed.ddp.find_unused_parameters: true, or freeze them"
                " (requires_grad_(False))"
            )
            raise RunError(what, why=why, fix=fix) from None
