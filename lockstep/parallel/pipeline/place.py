"""Places a model under a pipeline: each rank keeps its stages and builds its runner.

A rank shards or replicates its stages.

Under replicas or shards each stage is FSDP2's: on a mesh of (replicas, 1) it replicates, and all
schedules give correct gradients with it, which does not hold for DDP. FSDP2 holds the full
gradients of a rank's stages until a step's end.

Tests: tests/parallel/test_pipeline.py, tests/parity/test_pipeline.py
"""

from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.collectives import object_device
from lockstep.mesh import data_parallel_group
from lockstep.parallel import fsdp
from lockstep.parallel.fsdp_order import UnitOrder
from lockstep.parallel.fsdp_units import explain_mixing, sharded_units, used_elsewhere
from lockstep.parallel.loss_weights import train_loss_weights
from lockstep.parallel.parallel_model import ParallelModel, assign_strided
from lockstep.parallel.passes import AroundMicroBatch, Explain, Explains, explained, within
from lockstep.parallel.pipeline import stage_parameters
from lockstep.parallel.pipeline.plan import PipelinePlan, plan_of, splits_backward
from lockstep.parallel.pipeline.runner import Runner
from lockstep.parallel.pipeline.schedules import forward_program_of, program_of
from lockstep.parallel.pipeline.shapes import Shapes
from lockstep.parallel.pipeline.stage_module import StageModule, shard_stages, stage_module_of
from lockstep.parallel.pipeline.stage_sync import StageSync
from lockstep.parallel.pipeline.trees import StageTrees
from lockstep.parallel.placement import PlacementContext
from lockstep.parallel.reproducible.determinism import explain_kernel
from lockstep.parallel.reproducible.tree import assign_tree


@dataclass
class LocalStages:
    """This rank's stages, and what surrounds them."""

    plan: PipelinePlan
    held: stage_parameters.StageParameters
    parts: list[StageModule]
    frees: bool  # FSDP2 frees gathered parameters after each forward pass
    unit: nn.Module | None = None  # FSDP2's unit for parameters that stages share
    dp_rank: int = 0  # which of the parallel pipelines this rank is in
    dp_group: dist.ProcessGroup | None = None  # the ranks with the same stages
    trees: StageTrees | None = None


def place(placement: PlacementContext) -> ParallelModel:
    """Place a model over the axes of the mesh.

    Afterwards it keeps only descriptions of other ranks' parameters.
    """
    p, mesh, layout = placement, placement.mesh, placement.layout
    assert mesh is not None
    group, rank = mesh["pipeline"].get_group(), mesh["pipeline"].get_local_rank()
    plan = plan_of(p.facts, layout.pipeline, p.config)
    uses = plan.uses()
    p.log_lines.append(
        f"pipeline: {plan.facts.name}, {len(plan.parts.stages)} stages on {layout.pipeline}"
        f" ranks\n{plan.table()}"
    )
    halves, lines = splits_backward(plan, uses, p.config)
    p.log_lines += lines
    cut = local_stages(p, mesh, plan)
    for part in cut.parts:
        if part.is_last and p.loss is not None:  # after FSDP2, which leaves it whole
            part.loss_fn = p.loss.module
    cut.dp_rank = mesh["replicate"].get_local_rank() * layout.shard + mesh["shard"].get_local_rank()
    cut.dp_group = data_parallel_group(mesh) if layout.data_parallel_size > 1 else None
    groups = stage_parameters.groups_that_share(plan.across(), mesh.mesh.flatten(1).T.tolist())
    if p.reproducible:
        here = [part.index for part in cut.parts]
        cut.trees = StageTrees(
            cut.held, uses, here, p.device, mesh, cut.dp_group, groups, p.experts
        )
    runner = _runner(p, cut, group, halves=halves)
    finish = (
        partial(stage_parameters.sum_shared, cut.held, groups)
        if cut.trees is None
        else cut.trees.finish
    )
    assign = partial(assign_tree, even=True) if p.reproducible else assign_strided
    for axis in p.axes.values():
        axis.around(assign, 1.0)  # the trees of stages take what would stand around a micro-batch
    placed = ParallelModel(
        layout=layout,
        parts=list(cut.parts),
        parameters=cut.held.named_parameters(),
        objective=p.objective,
        random_state=p.random_state,
        assign=partial(assign, rank=cut.dp_rank, ranks=layout.data_parallel_size),
        passes=runner.forward_backward,
        evaluate=within(partial(explained, explanations_of(p)), runner.evaluate),
        forward=runner.forward,
        buffers={n: b for n, b in cut.held.named_buffers().items() if n in plan.model.persistent},
        finishers=[finish],
        norm_groups=([mesh["shard"].get_group()] if layout.shard > 1 else []) + [group],
        # the first does
        counted={n for n in cut.held.parameters if cut.held.across.get(n, [rank])[0] == rank},
        wants_data=any(part.is_first or part.is_last for part in cut.parts),
        log_lines=p.log_lines,
        reproducible=p.reproducible,
    )
    if p.loss is not None:
        placed = train_loss_weights(placed, p.loss, alone=p.dry_run is not None)
        # forward passes of the loss function change them elsewhere
        if not any(part.is_last for part in cut.parts):
            own = {name: b for name, b in placed.buffers.items() if name not in p.loss.buffers}
            placed = replace(placed, buffers=own)
    return placed


def local_stages(p: PlacementContext, mesh: DeviceMesh, plan: PipelinePlan) -> LocalStages:
    """Keep this rank's stages, release the others, and shard or replicate the kept ones."""
    rank, layout = mesh["pipeline"].get_local_rank(), p.layout
    held = stage_parameters.stage_parameters_of(
        rank, plan.model, plan.segments, plan.stage_of, plan.parts.ranks
    )
    observes = p.objective.in_outputs and p.objective.observed is not None
    parts = [
        stage_module_of(plan, stage, held, p.blocks, p.precision, observes=observes)
        for stage in plan.parts.of_rank(rank)
    ]
    stage_parameters.release(plan.model, held)
    stage_parameters.materialise(held, p.device, p.first, empty=p.dry_run is not None)
    strategy = p.config.distributed.fsdp.sharding_strategy
    frees = layout.shard > 1 and strategy in ("full_shard", "hybrid_shard")
    cut = LocalStages(plan, held, parts, frees)
    if layout.data_parallel_size > 1:
        shard = partial(
            fsdp.shard_stage, mesh, p.config, device_type=p.device_type, experts=p.experts
        )
        cut.unit, lines = shard_stages(parts, held, p.units, shard, cut.frees)
        p.log_lines += lines
    if layout.shard > 1 and p.dry_run is None:
        for part in parts:
            _hold_to_one_order(part, mesh["shard"].get_group(), p.device)
    return cut


def explanations_of(p: PlacementContext) -> list[Explain]:
    """Return what makes clearer errors of torch's, in training and in evaluation."""
    found: list[Explain] = [explain_kernel] if p.reproducible else []
    if p.layout.data_parallel_size > 1:  # the stages are FSDP2's
        found.append(partial(explain_mixing, explanation=used_elsewhere))
    return found


def around_stage(
    p: PlacementContext, cut: LocalStages, part: StageModule
) -> list[AroundMicroBatch]:
    """Return what stands around the passes of a stage, outermost first.

    The order is decided here alone.
    """
    dp_size = p.layout.data_parallel_size
    around: list[AroundMicroBatch] = [Explains(explain) for explain in explanations_of(p)]
    if p.dry_run is None and (buffers := p.running_buffers(part, dp_size, cut.dp_group)).any:
        around.append(buffers)
    # Around the last stage here, on ranks without a loss as well, which take part in the sum over
    # all ranks.
    if p.loss is not None and p.loss.any and p.dry_run is None and part is cut.parts[-1]:
        around.append(p.loss)
    if dp_size > 1:
        around.append(StageSync(part))
    return around


def _hold_to_one_order(part: StageModule, shards: dist.ProcessGroup, device: torch.device) -> None:
    """Make it an error if some ranks' data leave out a unit of a stage that others gather."""
    named = [(part.name_in_model(name), unit) for name, unit in sharded_units(part)]
    UnitOrder(named, device, {True: shards, False: shards}, shards, joins=False)


def _runner(
    p: PlacementContext, cut: LocalStages, group: dist.ProcessGroup, *, halves: bool
) -> Runner:
    plan, parts, dp_size = cut.plan, cut.parts, p.layout.data_parallel_size
    stages = len(plan.parts.stages)
    objects_on = object_device(p.device)
    knows_batches = parts[0].is_first and (p.cuts is None or p.cuts.cut.rank == 0)
    schedule = plan.facts.name, p.layout.pipeline, p.config.distributed.pipeline.stages_per_rank
    rank = dist.get_rank(group)
    runner = Runner(
        parts,
        {part.index: around_stage(p, cut, part) for part in parts},
        p.objective,
        p.random_state,
        plan.parts.ranks,
        group,
        p.device,
        objects_on,
        Shapes(cut.dp_rank, dp_size, knows_batches, objects_on, together=p.experts is not None),
        program=lambda count: program_of(*schedule, count, rank),
        forward_program=lambda count: forward_program_of(*schedule, count, rank),
        padded=lambda count: plan.facts.padded(count, p.layout.pipeline, stages),
        halves=halves,
        per_run=p.config.distributed.pipeline.n_microbatches,
        shared_unit=cut.unit,
        frees=cut.frees,
        trees=cut.trees,
    )
    # the pipeline's communicator is there before a send
    dist.all_reduce(torch.zeros(1, device=p.device), group=group)
    return runner
