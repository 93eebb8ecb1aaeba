"""`Site`: the model that is placed, the ranks, and what is decided about it before axes are asked.

`place` makes it of a model's facts and the config, and shows it to each axis (`Axis.apply`) and to
a strategy of a user's (`Strategy.place`).

Tests: tests/parallel/axes/test_axes.py, tests/plan/test_layouts.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import DDPConfig, StepConfig
from lockstep.layout import Layout
from lockstep.models.objective import Objective
from lockstep.parallel.execution.passes import AroundMicroBatch
from lockstep.parallel.facts import ModelFacts, on_meta
from lockstep.parallel.forward_effects.buffers import RunningBuffers
from lockstep.parallel.forward_effects.combined_buffers import BufferWays
from lockstep.parallel.fsdp.units import Unit
from lockstep.parallel.initial import FirstValues, materialise, to_empty
from lockstep.parallel.loss_weights import LossWeights
from lockstep.parallel.tensor.layer_cut import OnSend
from lockstep.precision import Precision
from lockstep.process_group.mesh import data_parallel_group
from lockstep.randomness import RandomState

Found = TypeVar("Found")


@dataclass(frozen=True)
class DryRun:
    """The differences where a model is placed without values, on fake tensors (`lockstep plan`)."""

    mesh: DeviceMesh | None  # over a fake process group; None on one rank
    # the device that the run will have, `cuda` or `cpu`; the fake tensors are on the CPU
    device_type: str
    # Makes the replacement for DDP's reducer, which refuses fake tensors.
    reducer: Callable[[nn.Module, DDPConfig], AroundMicroBatch] = lambda _model, _config: (
        AroundMicroBatch()
    )
    # (axis, bytes) of each message along it
    sends: Callable[[str, int], None] = lambda _axis, _size: None


@dataclass(frozen=True)
class Site:
    """The site of a placement: the model, the ranks, and the axes that are on them."""

    facts: ModelFacts  # what the model offers, as it was before anything was changed
    layout: Layout  # the number of ranks along each axis
    config: StepConfig  # the sections that say how a step is made
    precision: Precision  # of the forward pass
    random_state: RandomState  # what random numbers depend on
    loss: LossWeights | None = None  # of a loss function that is a module
    dry_run: DryRun | None = None  # set where the model has no values, and gets none
    log_lines: list[str] = field(default_factory=list)  # logged at start; axes add theirs

    # What `prepare` adds.
    mesh: DeviceMesh | None = None  # the ranks; None on one
    first: FirstValues | None = None  # makes the first values; None where the model has them
    # What FSDP2 gathers at once, inner ones first, the root last; read where it is needed.
    units: Sequence[Unit] = ()
    # how buffers combine that forward passes write
    ways: BufferWays = field(default_factory=lambda: BufferWays({}))

    # by name, of `Axis`: those that do something here, in order, as far as they have been asked.
    axes: dict[str, Any] = field(default_factory=dict)
    # of the model, or its stages, and the loss function
    running: list[RunningBuffers] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        """The model, keyed and transformed; axes change it in place."""
        return self.facts.model

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.random_state.device

    @property
    def objective(self) -> Objective:
        """Return the function that makes a loss of this rank's part of a batch."""
        objective = self.facts.objective
        for axis in self.axes.values():
            objective = axis.objective_of_parts(objective)
        return objective

    @property
    def spread_names(self) -> set[str]:
        """Names of the parameters of which replicas hold different pieces."""
        return {name for axis in self.axes.values() for name in axis.spread_names}

    @property
    def spread_parameters(self) -> set[nn.Parameter]:
        """These parameters, as they are now: a model that leaves meta gets others."""
        return {self.model.get_parameter(name) for name in self.spread_names}

    @property
    def device_type(self) -> str:
        """The type of the device of the run, also where a plan has fake tensors."""
        return self.device.type if self.dry_run is None else self.dry_run.device_type

    @property
    def has_values(self) -> bool:
        """Return whether the model's parameters have values."""
        return self.first is None and self.dry_run is None

    @property
    def reproducible(self) -> bool:
        """Return whether the step is to be the same in every bit on any layout."""
        return self.config.distributed.reproducible

    @property
    def rank(self) -> int:
        """The number of this process among those that share out micro-batches."""
        if self.mesh is None:
            return 0
        return dist.get_rank() // self.layout.same_batch_size % self.ranks

    @property
    def ranks(self) -> int:
        """The number of ranks (under a pipeline: of pipelines) that share out micro-batches."""
        return self.layout.data_parallel_size

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The data-parallel ranks that hold the same pieces; None: all ranks."""
        if self.mesh is None or self.ranks == self.layout.world_size:
            return None
        return data_parallel_group(self.mesh)

    def axis(self, kind: type[Found]) -> Found | None:
        """Return the axis of a class; None where it does nothing on this rank."""
        return next((axis for axis in self.axes.values() if isinstance(axis, kind)), None)

    def on_send(self, axis: str) -> OnSend | None:
        """Return what is told the bytes of each message along an axis; None but in a dry run.

        `axis` is the name of the class, whose `message_cost` says what these bytes cost.
        """
        return None if self.dry_run is None else partial(self.dry_run.sends, axis)

    def materialise(self) -> None:
        """Bring the model to its device.

        A model on meta gets storage and, except in a dry run, its first values.
        """
        if self.has_values:
            self.model.to(self.device)
            return
        if self.dry_run is not None and not on_meta(self.model):
            return  # it has storage already
        to_empty(self.model, self.device)
        if self.first is not None:
            materialise(self.model, self.first)

    def running_buffers(
        self, model: nn.Module, ranks: int, group: dist.ProcessGroup | None, *, row: int = 1
    ) -> RunningBuffers:
        """Return `RunningBuffers` of a model or a stage, which `ranks` ranks of a group hold."""
        running = RunningBuffers(
            model,
            ranks,
            group,
            reproducible=self.reproducible,
            row=row,
            random_state=self.random_state,
            ways=self.ways,
            has_values=self.dry_run is None,
            looks_every=self.config.distributed.divergence_check_steps or 100,
        )
        self.running.append(running)
        return running
