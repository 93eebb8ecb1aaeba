"""A model on its way to its ranks: what `place` hands to a strategy, and what the strategy gives back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import Config
from lockstep.layout import Layout
from lockstep.models.protocol import Objective
from lockstep.parallel.buffers import RunningBuffers
from lockstep.parallel.compression import Compression, compress
from lockstep.parallel.initial import FirstValues, materialise
from lockstep.parallel.loop import looped
from lockstep.parallel.parallel_model import MicroStep
from lockstep.precision import Precision
from lockstep.randomness import RandomState

Blocks = list[tuple[str, nn.Module]]


@dataclass
class PlacementContext:
    """What every strategy is given.

    Attributes:
        model: keyed and transformed; strategies change it in place.
        layout: where ranks stand.
        config: of the run.
        mesh: the ranks; None on one.
        objective: how a batch becomes a loss.
        device: of this rank.
        precision: of the forward pass.
        random_state: what random numbers depend on.
        blocks: the model's repeated blocks, by name.
        first: makes the first values; None where the model has them.
        log_lines: lines to be said at start; strategies add theirs.
    """

    model: nn.Module
    layout: Layout
    config: Config
    mesh: DeviceMesh | None
    objective: Objective
    device: torch.device
    precision: Precision
    random_state: RandomState
    blocks: Blocks
    first: FirstValues | None
    log_lines: list[str] = field(default_factory=list)

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
        """Bring the model to its device; a model on meta gets storage and its first values."""
        if self.first is None:
            self.model.to(self.device)
        else:
            self.model.to_empty(device=self.device)
            materialise(self.model, self.first, self.model.named_parameters())

    def compress(self) -> Compression:
        """What replicas send in place of their gradients, as the config says; the model is whole, and on its device."""
        assert self.mesh is not None
        undoable = self.precision.mode == "fp16"
        compression = compress(self.model, self.mesh["replicate"], self.config, undoable=undoable)
        self.log_lines += compression.log_lines
        return compression

    def loop(self, runs: nn.Module, *, objective: Objective | None = None, **synchronise: Any) -> MicroStep:
        """The loop's micro-step.

        Args:
            runs: the model as it is called: wrapped, or itself.
            objective: in place of the placement's.
            synchronise: see `lockstep.parallel.loop.looped`.
        """
        buffers = RunningBuffers(self.model, self.ranks, reproducible=self.reproducible)
        return looped(runs, objective or self.objective, self.random_state, self.precision, buffers, **synchronise)


class Tree(Protocol):
    """Adds up the gradients of micro-batches in one fixed order (`lockstep.parallel.tree`)."""

    def over(self, micro_step: MicroStep) -> MicroStep:
        """`micro_step`, whose gradients go to the tree."""

    def finish(self) -> None:
        """After the last backward pass of a step."""


@dataclass
class AppliedStrategy:
    """What a strategy made of a model whose micro-batches run one at a time.

    Attributes:
        micro_step: forward and backward of one micro-batch.
        assign: micro-batches in a step → (index, real) of those that this rank runs.
        tree: where the step must be the same in every bit.
        finish_gradients: what is left to do to `.grad` after the last backward pass of a step without a tree.
        compression: of gradients on the wire.
        norm_groups: process groups over which squared norms of the local gradients add up.
        counted: see `ParallelModel.counted`.
        parameters: what is trained in place of the model's own parameter of that name.
    """

    micro_step: MicroStep
    assign: Callable[[int], list[tuple[int, bool]]]
    tree: Tree | None = None
    finish_gradients: Callable[[], None] = lambda: None
    compression: Compression = field(default_factory=Compression)
    norm_groups: list[dist.ProcessGroup] = field(default_factory=list)
    counted: set[str] | None = None
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def shared_out(
    how: Callable[..., list[tuple[int, bool]]], placement: PlacementContext
) -> Callable[[int], list[tuple[int, bool]]]:
    """`how` for this rank of the placement's data-parallel ranks."""
    return partial(how, rank=placement.rank, ranks=placement.ranks)
