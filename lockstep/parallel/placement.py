"""A model on its way to its ranks: what `place` hands to a strategy, and what the strategy gives back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import DDPConfig, StepConfig
from lockstep.layout import Layout
from lockstep.models.protocol import Objective
from lockstep.parallel.compression import Compression, compress
from lockstep.parallel.initial import FirstValues, materialise
from lockstep.parallel.micro_step import AroundMicroBatch
from lockstep.precision import Precision
from lockstep.randomness import RandomState

Blocks = list[tuple[str, nn.Module]]


@dataclass(frozen=True)
class DryRun:
    """What is different where a model is placed without values, as `lockstep plan` does, on fake tensors.

    Attributes:
        mesh: over a fake process group; None on one rank.
        device_type: the device that the run will have, `cuda` or `cpu`; the fake tensors are on the CPU.
        reducer: makes what replaces DDP's reducer, which refuses fake tensors.
    """

    mesh: DeviceMesh | None
    device_type: str
    reducer: Callable[[nn.Module, DDPConfig], AroundMicroBatch]


@dataclass
class PlacementContext:
    """What every strategy is given.

    Attributes:
        model: keyed and transformed; strategies change it in place.
        layout: where ranks stand.
        config: the sections that say how a step is made.
        mesh: the ranks; None on one.
        objective: how a batch becomes a loss.
        device: of this rank.
        precision: of the forward pass.
        random_state: what random numbers depend on.
        blocks: the model's repeated blocks, by name.
        first: makes the first values; None where the model has them.
        log_lines: lines to be said at start; strategies add theirs.
        dry_run: set where the model has no values, and gets none.
    """

    model: nn.Module
    layout: Layout
    config: StepConfig
    mesh: DeviceMesh | None
    objective: Objective
    device: torch.device
    precision: Precision
    random_state: RandomState
    blocks: Blocks
    first: FirstValues | None
    log_lines: list[str] = field(default_factory=list)
    dry_run: DryRun | None = None

    @property
    def device_type(self) -> str:
        """The type of the device on which the model will run."""
        return self.device.type if self.dry_run is None else self.dry_run.device_type

    @property
    def has_values(self) -> bool:
        """Whether the model has its values already."""
        return self.first is None and self.dry_run is None

    @property
    def reproducible(self) -> bool:
        """Whether the step must be the same in every bit on any layout."""
        return self.config.distributed.reproducible

    @property
    def rank(self) -> int:
        """Of this process, in the world."""
        return dist.get_rank() if self.mesh is not None else 0

    @property
    def ranks(self) -> int:
        """Among which a step's micro-batches are shared out."""
        return self.layout.data_parallel_size

    def materialise(self) -> None:
        """Bring the model to its device; a model on meta gets storage and, except in a dry run, its first values."""
        if self.has_values:
            self.model.to(self.device)
            return
        self.model.to_empty(device=self.device)
        if self.first is not None:
            materialise(self.model, self.first, self.model.named_parameters())

    def compress(self) -> Compression:
        """What replicas send in place of their gradients, as the config says; the model is whole, and on its device."""
        assert self.mesh is not None
        undoable = self.precision.mode == "fp16"
        compression = compress(self.model, self.mesh["replicate"], self.config, undoable=undoable)
        self.log_lines += compression.log_lines
        return compression


class Tree(AroundMicroBatch, ABC):
    """Adds up the gradients of micro-batches in one fixed order (`lockstep.parallel.tree`)."""

    @abstractmethod
    def finish(self) -> None:
        """Finish the gradients after the last backward pass of a step."""


@dataclass
class AppliedStrategy:
    """What a strategy made of a model whose micro-batches run one at a time.

    Attributes:
        assign: micro-batches in a step → (index, real) of those that this rank runs.
        runs: the model as it is called; None: the model itself.
        objective: in place of the placement's.
        gradient_sync: lets the last backward pass of a step reduce gradients, and those before it not.
        around: further steps before and after each micro-batch, outermost first.
        multiplier: undoes a mean that the strategy's own reduction takes (DDP: the number of ranks).
        tree: where the step must be the same in every bit.
        finish_gradients: what is left to do to `.grad` after the last backward pass of a step without a tree.
        compression: of gradients on the link.
        norm_groups: process groups over which squared norms of the local gradients add up.
        counted: see `ParallelModel.counted`.
        parameters: what is trained in place of the model's own parameter of that name.
        statistics_over: ranks whose running statistics are one; None: all that share out a step.
    """

    assign: Callable[[int], list[tuple[int, bool]]]
    runs: nn.Module | None = None
    objective: Objective | None = None
    gradient_sync: AroundMicroBatch | None = None
    around: Sequence[AroundMicroBatch] = ()
    multiplier: float = 1.0
    tree: Tree | None = None
    finish_gradients: Callable[[], None] = lambda: None
    compression: Compression = field(default_factory=Compression)
    norm_groups: list[dist.ProcessGroup] = field(default_factory=list)
    counted: set[str] | None = None
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    statistics_over: int | None = None


def shared_out(
    how: Callable[..., list[tuple[int, bool]]], placement: PlacementContext
) -> Callable[[int], list[tuple[int, bool]]]:
    """`how` for this rank of the placement's data-parallel ranks."""
    return partial(how, rank=placement.rank, ranks=placement.ranks)
