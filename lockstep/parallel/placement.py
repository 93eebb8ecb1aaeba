"""Defines the arguments and the result of a strategy, and makes a `ParallelModel` of the result.

`placed_in_order` builds the `ParallelModel` of every strategy but pipelines: micro-batches run one
at a time.

Tests: tests/seams/test_strategy.py, tests/parity/test_data_parallel.py
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import DDPConfig, StepConfig
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.mesh import data_parallel_group
from lockstep.models.protocol import Objective
from lockstep.parallel.axes.axis import Axis
from lockstep.parallel.axes.expert import ExpertAxis
from lockstep.parallel.axes.rows import RowsAxis
from lockstep.parallel.axes.tensor import TensorAxis
from lockstep.parallel.batch_norm_rows import BatchNormRows
from lockstep.parallel.buffers import RunningBuffers
from lockstep.parallel.combined_buffers import BufferWays
from lockstep.parallel.comm.compression import Compression, compress
from lockstep.parallel.executor import Executor
from lockstep.parallel.expert import PlacedExperts
from lockstep.parallel.facts import ModelFacts, Named
from lockstep.parallel.initial import FirstValues, materialise, on_meta, to_empty
from lockstep.parallel.loss_weights import LossWeights, train_loss_weights
from lockstep.parallel.one_stage import evaluation_of, one_stage, plain_forward
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.passes import AroundMicroBatch
from lockstep.parallel.reproducible.determinism import DeterministicKernels
from lockstep.parallel.reproducible.gradient_trees import GradientTree
from lockstep.parallel.tensor_cuts import TensorCuts
from lockstep.precision import Precision
from lockstep.randomness import RandomState
from lockstep.registry import STRATEGIES, require_call


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


@dataclass
class PlacementContext:
    """The arguments of a strategy's `place`."""

    facts: ModelFacts  # what the model offers, as it was before anything was changed
    layout: Layout  # the number of ranks along each axis
    config: StepConfig  # the sections that say how a step is made
    mesh: DeviceMesh | None  # the ranks; None on one
    objective: Objective  # how a batch becomes a loss
    device: torch.device  # of this rank
    precision: Precision  # of the forward pass
    random_state: RandomState  # what random numbers depend on
    first: FirstValues | None  # makes the first values; None where the model has them
    # What FSDP2 gathers at once, without the root, inner ones first; read where it is needed.
    units: Named = ()
    log_lines: list[str] = field(default_factory=list)  # logged at start; strategies add theirs
    dry_run: DryRun | None = None  # set where the model has no values, and gets none
    # By name, in the order in which they have changed layers; without those that do nothing here.
    axes: Mapping[str, Axis] = field(default_factory=dict)
    loss: LossWeights | None = None  # of a loss function that is a module
    # how buffers combine that forward passes write
    ways: BufferWays = field(default_factory=lambda: BufferWays({}))
    # of the model, or its stages, and the loss function
    running: list[RunningBuffers] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        """The model, keyed and transformed; strategies change it in place."""
        return self.facts.model

    @property
    def blocks(self) -> Named:
        """The model's repeated blocks, by name."""
        return self.facts.blocks

    @property
    def experts(self) -> PlacedExperts | None:
        """The experts that are spread over ranks; None where the axis `expert` has one."""
        axis = self.axes.get(ExpertAxis.name)
        return axis.held if isinstance(axis, ExpertAxis) else None

    @property
    def cuts(self) -> TensorCuts | None:
        """The layers that are cut over the axis `tensor`, or run in blocks."""
        axis = self.axes.get(TensorAxis.name)
        return axis.cuts if isinstance(axis, TensorAxis) else None

    @property
    def batch_norm(self) -> BatchNormRows | None:
        """The rows of ranks that batch normalisation covers; None: it covers a micro-batch."""
        axis = self.axes.get(RowsAxis.name)
        return axis.rows if isinstance(axis, RowsAxis) else None

    @property
    def device_type(self) -> str:
        return self.device.type if self.dry_run is None else self.dry_run.device_type

    @property
    def has_values(self) -> bool:
        return self.first is None and self.dry_run is None

    @property
    def reproducible(self) -> bool:
        return self.config.distributed.reproducible

    @property
    def rank(self) -> int:
        """This process's rank among those that share the micro-batches (without a pipeline)."""
        return dist.get_rank() // self.layout.same_batch_size if self.mesh is not None else 0

    @property
    def ranks(self) -> int:
        return self.layout.data_parallel_size

    @property
    def dp_group(self) -> dist.ProcessGroup | None:
        """The data-parallel ranks that hold the same pieces; None: all ranks."""
        if self.mesh is None or self.layout.same_batch_size == 1:
            return None
        return data_parallel_group(self.mesh)

    def without_experts(self) -> AbstractContextManager[None]:
        """Return a context in which parameters of spread experts look as if not trained."""
        return nullcontext() if self.experts is None else self.experts.hidden()

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
        made = RunningBuffers(
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
        self.running.append(made)
        return made

    def compress(self) -> Compression:
        """Return the compression of gradients that the config asks for.

        The model is whole, and on its device.
        """
        assert self.mesh is not None
        bad = self.config.training.bad_numbers
        undoable = self.precision.mode == "fp16" or bad.action == "skip" or bad.recompute
        compression = compress(self.model, self.mesh["replicate"], self.config, undoable=undoable)
        self.log_lines += compression.log_lines
        return compression


@dataclass
class AppliedStrategy:
    """The result of a strategy for a model whose micro-batches run one at a time."""

    assign: Callable[[int], list[tuple[int, bool]]]  # as `ParallelModel.assign`
    runs: nn.Module | None = None  # the wrapped model; None: the model itself
    objective: Objective | None = None  # in place of the placement's
    # lets only the last backward pass of a step reduce
    gradient_sync: AroundMicroBatch | None = None
    # further steps before and after each micro-batch, outermost first
    around: Sequence[AroundMicroBatch] = ()
    # undoes a mean that the strategy's own reduction takes (DDP: the number of ranks)
    multiplier: float = 1.0
    tree: GradientTree | None = None  # where the step must be the same in every bit
    # where there is no tree, after a step's last backward pass
    finish_gradients: Callable[[], None] = lambda: None
    compression: Compression = field(default_factory=Compression)  # of gradients on the link
    # see `ParallelModel.norm_groups`
    norm_groups: list[dist.ProcessGroup] = field(default_factory=list)
    counted: set[str] | None = None  # see `ParallelModel.counted`
    # in place of the model's own, by name
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    # (micro-batches, rank=, ranks=) → what `assign` says on that rank; needed where experts are
    # spread and bits count
    of_any_rank: Callable[..., list[tuple[int, bool]]] | None = None
    # ranks whose running statistics are one; None: all that share out a step
    statistics_over: int | None = None


def shared_out(
    how: Callable[..., list[tuple[int, bool]]], placement: PlacementContext
) -> Callable[[int], list[tuple[int, bool]]]:
    """Return `how` for this rank among the placement's data-parallel ranks."""
    return partial(how, rank=placement.rank, ranks=placement.ranks)


def placed_in_order(placement: PlacementContext, applied: AppliedStrategy) -> ParallelModel:
    """Return the placed model of a strategy that runs a step's micro-batches in order."""
    p, model = placement, placement.model
    _check(applied, p)
    objective, runs = applied.objective or p.objective, applied.runs or model
    around = around_micro_batches(p, applied)
    stage = one_stage(runs, objective, p.random_state, p.precision, around)
    executor = Executor([stage], p.random_state, multiplier=applied.multiplier)
    placed = ParallelModel(
        layout=p.layout,
        parts=[model],
        # Read again: FSDP2 has put others in place of the parameters, and a device may have
        # buffers of its own.
        parameters=dict(model.named_parameters()) | applied.parameters,
        buffers={
            name: buffer for name, buffer in model.named_buffers() if name in p.facts.persistent
        },
        objective=p.objective,
        random_state=p.random_state,
        assign=applied.assign,
        micro_step=executor.micro_step,
        passes=executor.in_order,
        evaluate=evaluation_of(model, p.objective, p.random_state, p.precision),
        forward=plain_forward(model, p.precision),
        finishers=[applied.finish_gradients if applied.tree is None else applied.tree.finish],
        update_finishers=[applied.compression.finish_update],
        norm_groups=applied.norm_groups,
        counted=applied.counted,
        log_lines=p.log_lines,
        later_log_lines=applied.compression.later_log_lines,
        state=applied.compression.state,
        reproducible=p.reproducible,
    )
    if p.loss is None:
        return placed
    alone = p.dry_run is not None or applied.statistics_over == 1
    return train_loss_weights(placed, p.loss, alone=alone, scale=1.0 / applied.multiplier)


def _check(applied: AppliedStrategy, p: PlacementContext) -> None:
    """Reject an `assign` that takes other arguments, and an exchange that would be left out."""
    assign = f"assign of strategy {p.layout.strategy}"
    fix = "give AppliedStrategy shared_out(assign_contiguous, placement), which knows the rank"
    require_call(applied.assign, ("micro_batches",), assign, STRATEGIES.where, fix=fix)
    exchanges = applied.finish_gradients is not AppliedStrategy.finish_gradients
    if p.reproducible and exchanges and applied.tree is None:
        raise UsageError(
            f"strategy {p.layout.strategy} sums gradients in finish_gradients, and under"
            " reproducible it needs a tree",
            where=f"distributed.reproducible, {STRATEGIES.where}",
            fix=(
                "where placement.reproducible, give AppliedStrategy assign_tree and a tree such as "
                "ExchangedTree(parameters, group); or let the strategy say equal_bits = False"
            ),
        )


def around_micro_batches(p: PlacementContext, applied: AppliedStrategy) -> list[AroundMicroBatch]:
    """Return the steps around a micro-batch, outermost first; their order is decided here alone."""
    around: list[AroundMicroBatch] = []
    if applied.tree is not None:
        # the tree takes the gradients that all others have made
        around += [DeterministicKernels(), applied.tree]
    for axis in p.axes.values():
        around += axis.around(applied.of_any_rank, 1.0 / applied.multiplier)
    if applied.compression.powersgd is not None:
        around.append(applied.compression.powersgd)
    around += applied.around
    # without values there is no exchange
    ranks = 1 if p.dry_run is not None else applied.statistics_over or p.ranks
    row = 1 if p.batch_norm is None else p.batch_norm.ranks
    buffers = p.running_buffers(p.model, ranks, p.dp_group, row=row)
    if buffers.any:
        around.append(buffers)
    if p.loss is not None:
        of_loss = p.running_buffers(p.loss.module, ranks, p.dp_group, row=row)
        around += [step for step in (p.loss, of_loss) if step.any]
    if applied.gradient_sync is not None:
        # innermost: it finds missing gradients before others exchange anything
        around.append(applied.gradient_sync)
    return around
