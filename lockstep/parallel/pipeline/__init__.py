"""Pipeline parallelism: the model's segments are cut into stages, and micro-batches run through them.

    survey of the unsplit model → plan → each rank keeps its stages → shard or replicate → torch's schedule

The schedules are torch.distributed.pipelining's. Under replicas or shards each stage is FSDP2's: on a mesh of
(replicas, 1) it replicates, and all schedules are right with it, which DDP's are not. FSDP2 holds the full gradients of
a rank's stages until the end of a step here.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lockstep.config import Config
from lockstep.mesh import Layout
from lockstep.models.protocol import Objective
from lockstep.parallel.buffers import RunningBuffers
from lockstep.parallel.initial import FirstValues
from lockstep.parallel.pipeline.build import Blocks, Shard, part_of, shard_parts
from lockstep.parallel.pipeline.forward import Relay
from lockstep.parallel.pipeline.holding import Holding, holding_of, materialise, release
from lockstep.parallel.pipeline.part import Part, Work
from lockstep.parallel.pipeline.plan import Plan, frees_after_forward, plan_of, splits_backward
from lockstep.parallel.pipeline.runner import Runner
from lockstep.parallel.pipeline.shapes import Shapes, object_device
from lockstep.parallel.pipeline.shared import SharedSums
from lockstep.parallel.pipeline.torch_runtime import Schedule, Stage
from lockstep.parallel.pipeline.trees import StageTrees
from lockstep.parallel.placed import Placed, strided_shares
from lockstep.parallel.tree import tree_shares
from lockstep.precision import Precision
from lockstep.randomness import Cursor

__all__ = ["Plan", "lay_pipeline", "plan_of"]


def lay_pipeline(
    model: nn.Module, layout: Layout, config: Config, mesh: DeviceMesh, *, objective: Objective, cursor: Cursor,
    precision: Precision, blocks: Blocks, units: Blocks, first: FirstValues | None, device: torch.device, shard: Shard,
) -> Placed:  # fmt: skip
    """Lay a model over the axis `pipeline` of `mesh`, and its stages over the axes `replicate` and `shard`.

    Args:
        model: unsplit, keyed and transformed; afterwards it keeps only descriptions of other ranks' parameters.
        units: of FSDP2, chosen in the unsplit model.
        first: where it is on meta.
        shard: FSDP2 over the axes `replicate` and `shard`.

    Raises:
        UsageError: before anything is built, where model, schedule and ranks do not fit.
    """
    plan = plan_of(model, layout.pipeline, config)
    uses = plan.uses()
    frees = frees_after_forward(layout, config, plan.facts)
    halves, said = splits_backward(plan, uses, config)
    rank = mesh["pipeline"].get_local_rank()
    holding = holding_of(rank, plan.model, plan.segments, plan.stage_of, plan.parts.ranks)
    work = Work()
    parts = [part_of(plan, stage, holding, blocks, work, precision) for stage in plan.parts.of_rank(rank)]
    release(plan.model, holding)
    materialise(holding, first, device)
    unit = None
    if layout.data_parallel_size > 1:
        unit, more = shard_parts(parts, holding, units, shard, frees)
        said = [*said, *more]
    column, dp_group = _data_parallel(layout, mesh)
    shared = SharedSums(plan.across(), mesh.mesh.flatten(1).T.tolist(), holding.named_parameters)
    exact = config.distributed.reproducible
    trees = None
    if exact:
        here = [part.index for part in parts]
        trees = StageTrees(holding, uses, here, device, mesh, dp_group, shared.group_of)
    runner = _runner(
        plan, parts, layout, config, mesh["pipeline"].get_group(), device, column, dp_group, objective, cursor, work,
        unit, frees, trees, halves,
    )  # fmt: skip
    stages = f"{len(plan.parts.stages)} stages on {layout.pipeline} ranks"
    group = mesh["pipeline"].get_group()
    return Placed(
        layout=layout,
        parts=list(parts),
        parameters=holding.named_parameters(),
        objective=objective,
        cursor=cursor,
        assign=partial(
            partial(tree_shares, even=True) if exact else strided_shares, rank=column, ranks=layout.data_parallel_size
        ),
        forward_backward=runner.forward_backward,
        evaluate=runner.evaluate,
        forward=runner.forward,
        buffers={n: b for n, b in holding.named_buffers().items() if n in plan.model.persistent},
        finish_gradients=shared if trees is None else trees.finish,
        norm_groups=([mesh["shard"].get_group()] if layout.shard > 1 else []) + [group],
        counted=_counted(holding, rank),
        wants_data=any(part.is_first or part.is_last for part in parts),
        notices=[f"pipeline: {plan.facts.name}, {stages}\n{plan.table()}", *said],
        reproducible=exact,
    )


def _runner(
    plan: Plan, parts: list[Part], layout: Layout, config: Config, group: dist.ProcessGroup, device: torch.device,
    column: int, dp_group: dist.ProcessGroup | None, objective: Objective, cursor: Cursor, work: Work,
    unit: nn.Module | None, frees: bool, trees: StageTrees | None, halves: bool,
) -> Runner:  # fmt: skip
    stages, columns = len(plan.parts.stages), layout.data_parallel_size
    exact = config.distributed.reproducible
    objects_on = object_device(device)
    runner = Runner(
        parts, [RunningBuffers(part, columns, dp_group, reproducible=exact) for part in parts], objective, cursor, work,
        Relay(parts, plan.parts.ranks, group, device, objects_on),
        Shapes(column, columns, knows_batches=parts[0].is_first, device=objects_on),
        make_schedule=partial(Schedule, plan.facts.name),
        padded=lambda count: plan.facts.padded(count, layout.pipeline, stages),
        per_run=config.distributed.pipeline.n_microbatches,
        shared_unit=unit, frees=frees, trees=trees,
    )  # fmt: skip
    runner.stages = [
        Stage(
            part, part.index, stages, device, group, forward_at=runner.forward_at, backward_at=runner.backward_at,
            leaves=trees, halves=halves,
        )
        for part in parts
    ]  # fmt: skip
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # the pipeline's communicator exists before any send
    return runner


def _counted(holding: Holding, rank: int) -> set[str]:
    """Whose gradients this rank counts in a norm: of what several ranks of the pipeline hold, the first one."""
    return {name for name in holding.parameters if holding.across.get(name, [rank])[0] == rank}


def _data_parallel(layout: Layout, mesh: DeviceMesh) -> tuple[int, dist.ProcessGroup | None]:
    """Which of the pipelines side by side this rank is in, and the group of the ranks with the same stages."""
    column = mesh["replicate"].get_local_rank() * layout.shard + mesh["shard"].get_local_rank()
    mine = None
    for ranks in mesh.mesh.flatten(1).tolist():  # every rank makes every group
        made = dist.new_group(ranks) if layout.data_parallel_size > 1 else None
        if dist.get_rank() in ranks:
            mine = made
    return column, mine
