"""Makes a `ParallelModel` of a model whose micro-batches run one at a time.

`placed_in_order` builds the `ParallelModel` of all but pipelines, from what the axis or the
strategy that holds the model says of it (`AppliedStrategy`).

Tests: tests/seams/test_strategy.py, tests/parity/test_data_parallel.py
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from torch import nn

from lockstep.data.batches import AssignAnyRank, assign_contiguous, assign_strided
from lockstep.errors import UsageError
from lockstep.models.objective import Objective
from lockstep.parallel.axes.axis import PartOfModel
from lockstep.parallel.axes.rows import RowsAxis
from lockstep.parallel.comm.compression import Compression
from lockstep.parallel.execution.executor import Executor, stage_of_model
from lockstep.parallel.execution.one_stage import ForwardPasses
from lockstep.parallel.execution.passes import AroundMicroBatch
from lockstep.parallel.loss_accumulator import CarriedFigures
from lockstep.parallel.loss_weights import train_loss_weights
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.reproducible.determinism import DeterministicKernels
from lockstep.parallel.reproducible.gradient_trees import ExchangedTree, GradientTree, LocalTree
from lockstep.parallel.reproducible.tree import assign_tree
from lockstep.parallel.site import Site
from lockstep.registry import STRATEGIES, require_call


@dataclass(frozen=True)
class AppliedStrategy:
    """Describes how micro-batches, one at a time, run through a placed model."""

    # (micro-batches, rank, ranks) → (index, real) of each that a rank runs in a step, in order;
    # ranks are those that share out a step
    assign: AssignAnyRank
    runs: nn.Module | None = None  # the wrapped model; None: the model itself
    objective: Objective | None = None  # in place of the site's
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
    # see `ParallelModel.carried_figures`
    carried_figures: CarriedFigures | None = None
    # ranks whose running statistics are one; None: all that share out a step
    statistics_over: int | None = None


def place_whole(site: Site) -> ParallelModel:
    """Place a model that no axis holds: all of it, or its piece by other axes, on each rank.

    Where ranks share out micro-batches, each runs as many as the others, and an axis that stands
    around them sums gradients; under `reproducible` a tree does, over these ranks.
    """
    site.materialise()
    parameters = list(site.model.parameters())
    assign: AssignAnyRank = assign_contiguous if site.ranks == 1 else assign_strided
    tree: GradientTree | None = None
    if site.reproducible and site.ranks == 1:
        tree = LocalTree(parameters)
    elif site.reproducible:
        assign = assign_tree
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        tree = ExchangedTree(trained, site.dp_group)
    return placed_in_order(site, AppliedStrategy(assign, tree=tree))


def placed_in_order(site: Site, applied: AppliedStrategy) -> ParallelModel:
    """Return the placed model, which runs a step's micro-batches in order."""
    model = site.model
    _check(applied, site)
    objective = site.objective
    stage = stage_of_model(
        applied.runs or model,
        applied.objective or objective,
        site.precision,
        around_micro_batches(site, applied),
    )
    executor = Executor([stage], site.random_state, multiplier=applied.multiplier)
    alone = ForwardPasses(model, objective, site.random_state, site.precision)
    placed = ParallelModel(
        layout=site.layout,
        parts=[model],
        # Read again: FSDP2 has put others in place of the parameters, and a device may have
        # buffers of its own.
        parameters=dict(model.named_parameters()) | applied.parameters,
        buffers={
            name: buffer for name, buffer in model.named_buffers() if name in site.facts.persistent
        },
        objective=objective,
        random_state=site.random_state,
        assign=partial(applied.assign, rank=site.rank, ranks=site.ranks),
        run_micro_batch=executor.run_micro_batch,
        passes=executor.in_order,
        evaluate=alone.evaluate,
        forward=alone.forward,
        finishers=[applied.finish_gradients if applied.tree is None else applied.tree.finish],
        update_finishers=[applied.compression.finish_update],
        norm_groups=applied.norm_groups,
        counted=applied.counted,
        log_lines=site.log_lines,
        later_log_lines=applied.compression.later_log_lines,
        state=applied.compression.state,
        reproducible=site.reproducible,
        carried_figures=applied.carried_figures,
    )
    if site.loss is None:
        return placed
    has_own = site.dry_run is not None or applied.statistics_over == 1
    return train_loss_weights(placed, site.loss, alone=has_own, scale=1.0 / applied.multiplier)


def _check(applied: AppliedStrategy, site: Site) -> None:
    """Reject an `assign` that takes other arguments, and an exchange that would be left out."""
    assign = f"assign of strategy {site.layout.strategy}"
    fix = "give AppliedStrategy assign_contiguous, of lockstep.data.batches"
    arguments = ("micro_batches", "rank", "ranks")
    require_call(applied.assign, arguments, assign, STRATEGIES.where, fix=fix)
    exchanges = applied.finish_gradients is not AppliedStrategy.finish_gradients
    if site.reproducible and exchanges and applied.tree is None:
        raise UsageError(
            f"strategy {site.layout.strategy} sums gradients in finish_gradients, and under"
            " reproducible it needs a tree",
            where=f"distributed.reproducible, {STRATEGIES.where}",
            fix=(
                "where placement.reproducible, give AppliedStrategy assign_tree and a tree such as "
                "ExchangedTree(parameters, group); or let the strategy say equal_bits = False"
            ),
        )


def around_micro_batches(site: Site, applied: AppliedStrategy) -> list[AroundMicroBatch]:
    """Return the steps around a micro-batch, outermost first; their order is decided here alone."""
    around: list[AroundMicroBatch] = []
    if applied.tree is not None:
        # the tree takes the gradients that all others have made
        around += [DeterministicKernels(), applied.tree]
    part = PartOfModel(site.model, False, applied.assign, 1.0 / applied.multiplier)
    for axis in site.axes.values():
        around += axis.around_passes(part)
    if applied.compression.powersgd is not None:
        around.append(applied.compression.powersgd)
    around += applied.around
    # without values there is no exchange
    ranks = 1 if site.dry_run is not None else applied.statistics_over or site.ranks
    rows = site.axis(RowsAxis)
    row = 1 if rows is None else rows.rows.ranks
    buffers = site.running_buffers(site.model, ranks, site.dp_group, row=row)
    if buffers.any:
        around.append(buffers)
    if site.loss is not None:
        of_loss = site.running_buffers(site.loss.module, ranks, site.dp_group, row=row)
        around += [step for step in (site.loss, of_loss) if step.any]
    if applied.gradient_sync is not None:
        # innermost: it finds missing gradients before others exchange anything
        around.append(applied.gradient_sync)
    return around
