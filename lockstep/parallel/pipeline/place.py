"""Placing a model under a pipeline: each rank keeps its stages, shards or replicates them, and builds its runner.

The schedules are torch.distributed.pipelining's. Under replicas or shards each stage is FSDP2's: on a mesh of
(replicas, 1) it replicates, and all schedules are right with it, which DDP's are not. FSDP2 holds the full gradients of
a rank's stages until the end of a step here.
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.collectives import create_once, object_device
from lockstep.layout import Layout
from lockstep.parallel import fsdp
from lockstep.parallel.buffers import RunningBuffers
from lockstep.parallel.fsdp_usage import explain_mixing, used_elsewhere
from lockstep.parallel.micro_step import Explain, explained
from lockstep.parallel.parallel_model import ParallelModel, assign_strided
from lockstep.parallel.pipeline.build import part_of, shard_parts
from lockstep.parallel.pipeline.forward import Relay
from lockstep.parallel.pipeline.holding import Holding, holding_of, make_empty, materialise, release
from lockstep.parallel.pipeline.part import CurrentMicroBatch, StageModule
from lockstep.parallel.pipeline.plan import PipelinePlan, frees_after_forward, plan_of, splits_backward
from lockstep.parallel.pipeline.runner import Runner
from lockstep.parallel.pipeline.shapes import Shapes
from lockstep.parallel.pipeline.shared import SharedSums
from lockstep.parallel.pipeline.torch_schedule import PipelineSchedule
from lockstep.parallel.pipeline.torch_stage import Stage
from lockstep.parallel.pipeline.trees import StageTrees
from lockstep.parallel.placement import PlacementContext
from lockstep.parallel.reproducible import explain_kernel
from lockstep.parallel.tree import assign_tree


@dataclass
class LocalStages:
    """This rank's stages, and what runs them.

    Attributes:
        unit: FSDP2's unit for what stages share.
        column: which of the pipelines side by side this rank is in.
        columns: the group of the ranks with the same stages.
        frees: stages let go of gathered parameters after each forward pass.
    """

    plan: PipelinePlan
    holding: Holding
    parts: list[StageModule]
    work: CurrentMicroBatch
    frees: bool
    unit: nn.Module | None = None
    column: int = 0
    columns: dist.ProcessGroup | None = None
    trees: StageTrees | None = None


def place(placement: PlacementContext) -> ParallelModel:
    """Place a model over the axis `pipeline` of the mesh, and its stages over the axes `replicate` and `shard`.

    Args:
        placement: afterwards its model keeps only descriptions of other ranks' parameters.

    Raises:
        UsageError: before anything is built, where model, schedule and ranks do not fit.
    """
    p, mesh, layout = placement, placement.mesh, placement.layout
    assert mesh is not None
    group = mesh["pipeline"].get_group()
    plan = plan_of(p.model, layout.pipeline, p.config)
    uses = plan.uses()
    p.log_lines.append(
        f"pipeline: {plan.facts.name}, {len(plan.parts.stages)} stages on {layout.pipeline} ranks\n{plan.table()}"
    )
    halves, said = splits_backward(plan, uses, p.config)
    p.log_lines += said
    cut = local_stages(p, mesh, plan)
    cut.column, cut.columns = _data_parallel(layout, mesh)
    shared = SharedSums(plan.across(), mesh.mesh.flatten(1).T.tolist(), cut.holding.named_parameters)
    if p.reproducible:
        here = [part.index for part in cut.parts]
        cut.trees = StageTrees(cut.holding, uses, here, p.device, mesh, cut.columns, shared.group_of)
    runner = _runner(p, cut, group, halves=halves)
    exact = p.reproducible
    explanations: list[Explain] = [
        *([partial(explain_mixing, explanation=used_elsewhere)] if layout.data_parallel_size > 1 else []),  # FSDP2's
        *([explain_kernel] if exact else []),
    ]
    assign = partial(assign_tree, even=True) if exact else assign_strided
    return ParallelModel(
        layout=layout,
        parts=list(cut.parts),
        parameters=cut.holding.named_parameters(),
        objective=p.objective,
        random_state=p.random_state,
        assign=partial(assign, rank=cut.column, ranks=layout.data_parallel_size),
        forward_backward=explained(runner.forward_backward, explanations),
        evaluate=explained(runner.evaluate, explanations),
        forward=runner.forward,
        buffers={n: b for n, b in cut.holding.named_buffers().items() if n in plan.model.persistent},
        finish_gradients=shared if cut.trees is None else cut.trees.finish,
        norm_groups=([mesh["shard"].get_group()] if layout.shard > 1 else []) + [group],
        counted=_counted(cut.holding, mesh["pipeline"].get_local_rank()),
        wants_data=any(part.is_first or part.is_last for part in cut.parts),
        log_lines=p.log_lines,
        reproducible=exact,
    )


def local_stages(p: PlacementContext, mesh: DeviceMesh, plan: PipelinePlan) -> LocalStages:
    """Keep this rank's stages, let go of the others, and shard or replicate what is left."""
    rank, layout = mesh["pipeline"].get_local_rank(), p.layout
    units = fsdp.units_of(p.model, p.config.distributed.fsdp, p.blocks)  # in the unsplit model
    holding = holding_of(rank, plan.model, plan.segments, plan.stage_of, plan.parts.ranks)
    work = CurrentMicroBatch(observes=p.objective.in_outputs and p.objective.observed is not None)
    parts = [part_of(plan, stage, holding, p.blocks, work, p.precision) for stage in plan.parts.of_rank(rank)]
    release(plan.model, holding)
    if p.dry_run is None:
        materialise(holding, p.first, p.device)
    else:
        make_empty(holding, p.device)
    cut = LocalStages(plan, holding, parts, work, frees_after_forward(layout, p.config))
    if layout.data_parallel_size > 1:
        shard = partial(fsdp.shard_stage, mesh, p.config, device_type=p.device_type)
        cut.unit, said = shard_parts(parts, holding, units, shard, cut.frees)
        p.log_lines += said
    return cut


def _runner(p: PlacementContext, cut: LocalStages, group: dist.ProcessGroup, *, halves: bool) -> Runner:
    plan, parts, columns = cut.plan, cut.parts, p.layout.data_parallel_size
    stages = len(plan.parts.stages)
    objects_on = object_device(p.device)
    runner = Runner(
        parts,
        [RunningBuffers(part, columns, cut.columns, reproducible=p.reproducible) for part in parts],
        p.objective,
        p.random_state,
        cut.work,
        Relay(parts, plan.parts.ranks, group, p.device, objects_on),
        Shapes(cut.column, columns, knows_batches=parts[0].is_first, device=objects_on),
        make_schedule=partial(PipelineSchedule, plan.facts.name),
        padded=lambda count: plan.facts.padded(count, p.layout.pipeline, stages),
        per_run=p.config.distributed.pipeline.n_microbatches,
        shared_unit=cut.unit,
        frees=cut.frees,
        trees=cut.trees,
    )
    at = {"forward_at": runner.forward_at, "backward_at": runner.backward_at}
    runner.stages = [
        Stage(part, part.index, stages, p.device, group, **at, leaves=cut.trees, halves=halves) for part in parts
    ]
    dist.all_reduce(torch.zeros(1, device=p.device), group=group)  # the pipeline's communicator is there before a send
    return runner


def _counted(holding: Holding, rank: int) -> set[str]:
    """Whose gradients this rank counts in a norm: of what several ranks of the pipeline hold, the first one."""
    return {name for name in holding.parameters if holding.across.get(name, [rank])[0] == rank}


def _data_parallel(layout: Layout, mesh: DeviceMesh) -> tuple[int, dist.ProcessGroup | None]:
    """Which of the pipelines side by side this rank is in, and the group of the ranks with the same stages."""
    column = mesh["replicate"].get_local_rank() * layout.shard + mesh["shard"].get_local_rank()
    mine = None
    for ranks in mesh.mesh.flatten(1).tolist():  # every rank makes every group
        made = (
            create_once(("columns", *ranks), partial(dist.new_group, ranks)) if layout.data_parallel_size > 1 else None
        )
        if dist.get_rank() in ranks:
            mine = made
    return column, mine
