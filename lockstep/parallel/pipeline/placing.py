"""Makes stages of a model on this rank, and what runs them.

    the plan               which segments are a stage, and which rank has it (plan.py)
    this rank's stages     kept, the others released; sharded or replicated by FSDP2 where ranks
                           share out micro-batches (stage_parameters.py, stage_module.py)
    sums of gradients      over micro-batches, pipelines, and stages that share a weight (trees.py)
    what stands around     each pass of a stage: one list, made here alone
    the runner             which runs the schedule over messages (runner.py)

Tests: tests/parallel/pipeline/test_pipeline.py, tests/parity/test_pipeline.py
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.data.batches import AssignAnyRank, assign_strided
from lockstep.parallel.axes.axis import PartOfModel
from lockstep.parallel.axes.expert import ExpertAxis
from lockstep.parallel.axes.shard import ShardAxis
from lockstep.parallel.axes.tensor import TensorAxis
from lockstep.parallel.execution.passes import (
    AroundMicroBatch,
    Explain,
    Explains,
    explained,
    within,
)
from lockstep.parallel.fsdp.calls import watch_stage
from lockstep.parallel.fsdp.units import explain_mixing, used_elsewhere
from lockstep.parallel.loss_weights import train_loss_weights
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.pipeline import stage_parameters
from lockstep.parallel.pipeline.plan import PipelinePlan, plan_of, splits_backward
from lockstep.parallel.pipeline.runner import Runner
from lockstep.parallel.pipeline.schedules import forward_program_of, program_of
from lockstep.parallel.pipeline.shapes import Shapes
from lockstep.parallel.pipeline.stage_module import StageModule, shard_stages, stage_module_of
from lockstep.parallel.pipeline.stage_sync import StageSync
from lockstep.parallel.pipeline.trees import StageTrees, Uses
from lockstep.parallel.reproducible.determinism import explain_kernel
from lockstep.parallel.reproducible.tree import assign_tree
from lockstep.parallel.site import Site
from lockstep.process_group.collectives import object_device


@dataclass
class LocalStages:
    """This rank's stages, and what surrounds them."""

    plan: PipelinePlan
    held: stage_parameters.StageParameters
    parts: list[StageModule]
    shard: ShardAxis | None  # cut or replicated the stages; None: neither
    frees: bool  # FSDP2 frees gathered parameters after each forward pass
    unit: nn.Module | None  # FSDP2's unit for parameters that stages share


@dataclass(frozen=True)
class _GradientSums:
    """The way in which gradients of this rank's stages are summed.

    Over micro-batches, pipelines, and stages that share a weight.
    """

    assign: AssignAnyRank  # the micro-batches of a step to pipelines
    finishers: list[Callable[[], None]]  # complete `.grad` after the last backward pass
    trees: StageTrees | None  # sum gradients under `reproducible`


def place_stages(site: Site, pipeline: DeviceMesh) -> ParallelModel:
    """Place a model as stages, over the ranks of this rank's pipeline.

    Afterwards this rank keeps only descriptions of other ranks' parameters.
    """
    plan = plan_of(site.facts, pipeline.size(), site.config)
    uses = plan.uses()
    halves, lines = splits_backward(plan, uses, site.config)
    site.log_lines.append(
        f"pipeline: {plan.facts.name}, {len(plan.parts.stages)} stages on"
        f" {pipeline.size()} ranks\n{plan.table()}"
    )
    site.log_lines.extend(lines)

    local = local_stages(site, pipeline, plan)
    last = next((part for part in local.parts if part.is_last), None)
    if last is not None and site.loss is not None:  # after FSDP2, which leaves it unsharded
        last.hold(site.loss.module)
    sums = _gradient_sums(site, local, uses)
    runner = _runner(site, local, sums, pipeline.get_group(), halves=halves)
    placed = _as_parallel_model(site, local, sums, runner, pipeline)
    if site.loss is None:
        return placed

    placed = train_loss_weights(placed, site.loss, alone=site.dry_run is not None)
    if last is not None:
        return placed
    # forward passes of the loss function change its buffers on the ranks of the last stage alone
    of_loss = site.loss.buffers
    own = {name: buffer for name, buffer in placed.buffers.items() if name not in of_loss}
    return replace(placed, buffers=own)


def _gradient_sums(site: Site, local: LocalStages, uses: Uses) -> _GradientSums:
    """Return how gradients are summed: up trees under `reproducible`, else as they are added.

    `uses`: the stages that use each parameter.
    """
    mesh = site.mesh
    assert mesh is not None
    groups = stage_parameters.groups_that_share(
        local.plan.across(), mesh.mesh.flatten(1).T.tolist()
    )
    if not site.reproducible:
        sum_shared = partial(stage_parameters.sum_shared, local.held, groups)
        return _GradientSums(assign_strided, [sum_shared] if groups else [], None)

    expert = site.axis(ExpertAxis)
    trees = StageTrees(
        local.held,
        uses,
        [part.index for part in local.parts],
        site.device,
        mesh,
        _parallel_pipelines(site),
        groups,
        None if expert is None else expert.held,
    )
    return _GradientSums(partial(assign_tree, even=True), [trees.finish], trees)


def _as_parallel_model(
    site: Site, local: LocalStages, sums: _GradientSums, runner: Runner, pipeline: DeviceMesh
) -> ParallelModel:
    """Return this rank's stages as the step sees them."""
    held = local.held
    rank = pipeline.get_local_rank()
    norm_groups = [pipeline.get_group()]
    shards = _shards(site)
    if shards is not None:
        norm_groups.insert(0, shards)
    persistent = local.plan.model.persistent
    return ParallelModel(
        layout=site.layout,
        parts=list(local.parts),
        parameters=held.named_parameters(),
        objective=site.objective,
        random_state=site.random_state,
        assign=partial(sums.assign, rank=site.rank, ranks=site.ranks),
        passes=runner.forward_backward,
        evaluate=within(partial(explained, explanations_of(site)), runner.evaluate),
        forward=runner.forward,
        buffers={name: b for name, b in held.named_buffers().items() if name in persistent},
        finishers=sums.finishers,
        norm_groups=norm_groups,
        # a weight that several ranks hold is counted by the first of them
        counted={name for name in held.parameters if held.across.get(name, [rank])[0] == rank},
        wants_data=any(part.is_first or part.is_last for part in local.parts),
        log_lines=site.log_lines,
        reproducible=site.reproducible,
    )


def _shards(site: Site) -> dist.ProcessGroup | None:
    """Return the ranks that hold the other shares of this rank's parameters; None: none do."""
    assert site.mesh is not None
    return site.mesh["shard"].get_group() if site.layout.shards_parameters else None


def local_stages(site: Site, pipeline: DeviceMesh, plan: PipelinePlan) -> LocalStages:
    """Keep this rank's stages, release the others, and shard or replicate the kept ones."""
    rank = pipeline.get_local_rank()
    held = stage_parameters.stage_parameters_of(
        rank, plan.model, plan.segments, plan.stage_of, plan.parts.ranks
    )
    observes = site.objective.in_outputs and site.objective.observed is not None
    blocks = site.facts.blocks
    parts = [
        stage_module_of(plan, stage, held, blocks, site.precision, observes=observes)
        for stage in plan.parts.of_rank(rank)
    ]
    stage_parameters.release(plan.model, held)
    stage_parameters.materialise(held, site.device, site.first, empty=site.dry_run is not None)
    shard = site.axis(ShardAxis)
    if shard is None:
        return LocalStages(plan, held, parts, shard=None, frees=False, unit=None)

    several = site.layout.shards_parameters
    strategy = site.config.distributed.fsdp.sharding_strategy
    frees = several and strategy in ("full_shard", "hybrid_shard")
    inner = [(unit.name, unit.module) for unit in site.units[:-1]]
    unit, sharded, lines = shard_stages(parts, held, inner, shard.cut_stage, frees)
    site.log_lines.extend(lines)
    shards = None if site.dry_run is not None else _shards(site)
    for units in sharded:
        watch_stage(units, shards, site.device)
    return LocalStages(plan, held, parts, shard, frees, unit)


def explanations_of(site: Site) -> list[Explain]:
    """Return what makes clearer errors of torch's, in training and in evaluation."""
    explanations: list[Explain] = [explain_kernel] if site.reproducible else []
    if site.axis(ShardAxis) is not None:  # the stages are FSDP2's
        explanations.append(partial(explain_mixing, explanation=used_elsewhere))
    return explanations


def around_stage(
    site: Site, local: LocalStages, part: StageModule, assign: AssignAnyRank
) -> list[AroundMicroBatch]:
    """Return what stands around the passes of a stage, outermost first.

    The order is decided here alone.
    """
    around: list[AroundMicroBatch] = [Explains(explain) for explain in explanations_of(site)]
    for axis in site.axes.values():
        around += axis.around_passes(PartOfModel(part, True, assign))
    # without values there is no exchange
    if site.dry_run is None:
        buffers = site.running_buffers(part, site.ranks, _parallel_pipelines(site))
        around += [buffers] if buffers.any else []
        # Around the last stage here, on ranks without a loss as well, which take part in the sum
        # over all ranks.
        if site.loss is not None and site.loss.any and part is local.parts[-1]:
            around.append(site.loss)
    if local.shard is not None:
        around.append(StageSync(part))
    return around


def _parallel_pipelines(site: Site) -> dist.ProcessGroup | None:
    """Return the ranks that hold the same stages; None where there is one pipeline."""
    return site.dp_group if site.ranks > 1 else None


def _runner(
    site: Site,
    local: LocalStages,
    sums: _GradientSums,
    group: dist.ProcessGroup,
    *,
    halves: bool,
) -> Runner:
    """Return what runs this rank's stages, over the ranks of its pipeline.

    `halves`: see `Runner`.
    """
    plan = local.plan
    parts = local.parts
    options = site.config.distributed.pipeline
    stages = len(plan.parts.stages)
    objects_on = object_device(site.device)
    tensor = site.axis(TensorAxis)
    knows_batches = parts[0].is_first and (tensor is None or tensor.cuts.cut.rank == 0)
    ranks = dist.get_world_size(group)
    schedule = plan.facts.name, ranks, options.stages_per_rank
    rank = dist.get_rank(group)
    runner = Runner(
        parts=parts,
        around={part.index: around_stage(site, local, part, sums.assign) for part in parts},
        objective=site.objective,
        random_state=site.random_state,
        rank_of=plan.parts.ranks,
        group=group,
        device=site.device,
        objects_on=objects_on,
        shapes=Shapes(
            site.rank, site.ranks, knows_batches, objects_on, together=bool(site.spread_names)
        ),
        program=lambda count: program_of(*schedule, count, rank),
        forward_program=lambda count: forward_program_of(*schedule, count, rank),
        padded=cache(partial(plan.facts.padded, ranks=ranks, stages=stages)),
        halves=halves,
        per_run=options.n_microbatches,
        shared_unit=local.unit,
        frees=local.frees,
        trees=sums.trees,
    )
    # the pipeline's communicator is there before a send
    dist.all_reduce(torch.zeros(1, device=site.device), group=group)
    return runner
