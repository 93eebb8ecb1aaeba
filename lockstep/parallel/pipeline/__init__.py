"""Pipeline parallelism: the model's segments are cut into stages, and micro-batches run through them.

    survey of the unsplit model → partition → each rank keeps its stages → shard or replicate → torch's schedule

The schedules are torch.distributed.pipelining's. Under replicas or shards each stage is FSDP2's: on a mesh of
(replicas, 1) it replicates, and all schedules are right with it, which DDP's are not. FSDP2 holds the full gradients of
a rank's stages until the end of a step here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lockstep.config import Config
from lockstep.errors import UsageError
from lockstep.mesh import Layout
from lockstep.models.protocol import Objective, segments_of
from lockstep.parallel.buffers import RunningBuffers
from lockstep.parallel.initial import FirstValues
from lockstep.parallel.pipeline.forward import Relay
from lockstep.parallel.pipeline.holding import Holding, Segments, Survey, holding_of, materialise, release, survey
from lockstep.parallel.pipeline.part import Part, Work
from lockstep.parallel.pipeline.partition import Partition, partition, table
from lockstep.parallel.pipeline.runner import Runner
from lockstep.parallel.pipeline.schedules import ScheduleFacts, facts_of
from lockstep.parallel.pipeline.shapes import Shapes, object_device
from lockstep.parallel.pipeline.shared import SharedSums
from lockstep.parallel.pipeline.torch_runtime import Schedule, Stage
from lockstep.parallel.pipeline.trees import StageTrees, Uses
from lockstep.parallel.placed import Placed, strided_shares
from lockstep.parallel.tree import tree_shares
from lockstep.precision import Precision
from lockstep.randomness import Cursor

__all__ = ["lay_pipeline"]

Blocks = list[tuple[str, nn.Module]]
Shard = Callable[[nn.Module, Blocks, set[nn.Parameter], bool], list[str]]
"""(root, its units, parameters that are another root's, free parameters after each forward pass) → lines to be said."""


@dataclass(frozen=True)
class Plan:
    """Which rank holds what, before anything is cut."""

    model: Survey
    segments: Segments
    facts: ScheduleFacts
    parts: Partition

    @property
    def stage_of(self) -> dict[str, int]:
        return {self.segments[i][0]: stage for stage, span in enumerate(self.parts.stages) for i in span}

    def uses(self) -> Uses:
        """Where trainable parameters are used; to be read before anything is let go of."""
        tensors = {name: spots[0].tensor() for name, spots in self.model.parameters.items()}
        stages = {
            name: sorted({self.stage_of[user] for user in users})
            for name, users in self.model.users.items()
            if users and tensors[name].requires_grad
        }
        like = {n: torch.empty_like(tensors[n], device="meta") for n, used in stages.items() if len(used) > 1}
        return Uses(stages, like, self.parts.ranks)

    def table(self) -> str:
        names = [name for name, _ in self.segments]
        return table(self.parts, names, self.model.costs(names))


def plan_of(model: nn.Module, ranks: int, config: Config) -> Plan:
    """Decide on the stages of an unsplit model.

    Raises:
        UsageError: the model is no chain of segments, or stages, ranks and cuts do not agree.
    """
    pipeline = config.distributed.pipeline
    segments = segments_of(model)
    if segments is None:
        raise UsageError(
            f"{type(model).__name__} can't be cut into stages",
            where="distributed.strategy: pipeline",
            why="a pipeline needs the forward pass as a chain of modules",
            fix="give the model a method segments() -> [(name, module)], each taking what the one before it returns; "
            "or make it an nn.Sequential; or, if torch can export it, lockstep.parallel.pipeline.trace makes a chain",
        )
    facts = facts_of(pipeline.schedule, pipeline.stages_per_rank)
    read = survey(model, segments)
    names = [name for name, _ in segments]
    parts = partition(
        names, read.costs(names), ranks=ranks, stages_per_rank=pipeline.stages_per_rank,
        split_spec=pipeline.split_spec, v_shaped=facts.v_shaped,
    )  # fmt: skip
    plan = Plan(read, segments, facts, parts)
    _refuse_empty(plan)
    return plan


def _refuse_empty(plan: Plan) -> None:
    users = {user for segments in plan.model.users.values() for user in segments}
    for stage, span in enumerate(plan.parts.stages):
        names = [plan.segments[i][0] for i in span]
        if not users & set(names):
            raise UsageError(
                f"stage {stage} ({', '.join(names)}) has no parameters: there is nothing to train in it",
                where="distributed.pipeline.split_spec",
                fix="cut elsewhere, or use fewer stages",
            )


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
    exact = config.distributed.reproducible
    uses = plan.uses()
    if exact:
        _refuse_split_sums(uses, plan.facts)
    frees = _frees_after_forward(layout, config, plan.facts)
    group = mesh["pipeline"].get_group()
    rank = mesh["pipeline"].get_local_rank()
    here = plan.parts.of_rank(rank)
    holding = holding_of(rank, plan.model, plan.segments, plan.stage_of, plan.parts.ranks)
    work = Work()
    parts = [_part(plan, stage, holding, blocks, work, precision) for stage in here]
    release(plan.model, holding)
    materialise(holding, first, device)
    stages = len(plan.parts.stages)
    notices = [f"pipeline: {plan.facts.name}, {stages} stages on {layout.pipeline} ranks\n{plan.table()}"]
    unit = None
    if layout.data_parallel_size > 1:
        unit, said = _shard(parts, holding, units, shard, frees)
        notices += said
    column, dp_group = _data_parallel(layout, mesh)
    assign = partial(tree_shares, even=True) if exact else strided_shares
    shared = SharedSums(_across(plan), mesh.mesh.flatten(1).T.tolist(), holding.named_parameters)
    trees = StageTrees(holding, uses, here, device, mesh, dp_group, shared.group_of) if exact else None
    buffers = [RunningBuffers(part, layout.data_parallel_size, dp_group, reproducible=exact) for part in parts]
    objects_on = object_device(device)
    runner = Runner(
        parts, buffers, objective, cursor, work,
        Relay(parts, plan.parts.ranks, group, device, objects_on),
        Shapes(column, layout.data_parallel_size, knows_batches=parts[0].is_first, device=objects_on),
        make_schedule=partial(Schedule, plan.facts.name),
        padded=lambda count: plan.facts.padded(count, layout.pipeline, stages),
        per_run=config.distributed.pipeline.n_microbatches,
        shared_unit=unit,
        frees=frees,
        trees=trees,
    )  # fmt: skip
    runner.stages = [
        Stage(
            part, part.index, stages, device, group, forward_at=runner.forward_at, backward_at=runner.backward_at,
            leaves=trees,
        )
        for part in parts
    ]  # fmt: skip
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # the pipeline's communicator exists before any send
    return Placed(
        layout=layout,
        parts=list(parts),
        parameters=holding.named_parameters(),
        objective=objective,
        cursor=cursor,
        assign=partial(assign, rank=column, ranks=layout.data_parallel_size),
        forward_backward=runner.forward_backward,
        evaluate=runner.evaluate,
        forward=runner.forward,
        buffers={n: b for n, b in holding.named_buffers().items() if n in plan.model.persistent},
        finish_gradients=shared if trees is None else trees.finish,
        norm_groups=([mesh["shard"].get_group()] if layout.shard > 1 else []) + [group],
        counted={name for name in holding.parameters if holding.across.get(name, [rank])[0] == rank},
        wants_data=any(part.is_first or part.is_last for part in parts),
        notices=notices,
        reproducible=exact,
    )


def _refuse_split_sums(uses: Uses, facts: ScheduleFacts) -> None:
    """Refuse to hand on running sums of shared weights where weights come later than what is handed on.

    Raises:
        UsageError: naming schedule and parameters.
    """
    if uses.like and facts.splits_backward:
        raise UsageError(
            f"{facts.name} can't give the same bits for parameters that several stages use: {', '.join(uses.like)}",
            where="distributed.reproducible, distributed.pipeline.schedule",
            why="it computes gradients of weights after it has sent on those of inputs, and with them go the sums",
            fix="use the schedule 1F1B, or set distributed.reproducible: false",
        )


def _frees_after_forward(layout: Layout, config: Config, facts: ScheduleFacts) -> bool:
    """Whether FSDP2 frees gathered parameters after each forward pass.

    Raises:
        UsageError: the schedule still needs them: it would compute wrong gradients, and say nothing.
    """
    kind = config.distributed.fsdp.sharding_strategy
    frees = layout.shard > 1 and kind in ("full_shard", "hybrid_shard")
    if frees and facts.splits_backward:
        raise UsageError(
            f"{kind} frees parameters that {facts.name} still needs: its gradients would be wrong",
            where="distributed.fsdp.sharding_strategy",
            fix="set distributed.fsdp.sharding_strategy: shard_grad_op",
        )
    return frees


def _part(plan: Plan, stage: int, holding: Holding, blocks: Blocks, work: Work, precision: Precision) -> Part:
    segments = [plan.segments[i] for i in plan.parts.stages[stage]]
    inside = {id(module) for _, segment in segments for module in segment.modules()}
    borrowed = {
        name: {
            keyword: holding.parameters[parameter][0] for keyword, parameter in plan.model.lent.get(name, {}).items()
        }
        for name, _ in segments
    }
    # A module that is a segment several times draws anew each time it runs, and counts these under all its names.
    before = [id(module) for i in range(plan.parts.stages[stage].start) for module in [plan.segments[i][1]]]
    earlier = {name: before.count(id(module)) for name, module in plan.segments if id(module) in before}
    return Part(
        stage, len(plan.parts.stages), segments, borrowed=borrowed,
        blocks=[(name, block) for name, block in blocks if id(block) in inside],
        earlier=earlier, work=work, precision=precision,
    )  # fmt: skip


class SharedUnit(nn.Module):
    """One unit of FSDP2 for all parameters that several stages use: its children own or register them."""

    def forward(self) -> None:
        """Computes nothing: its parameters are gathered and reduced by hand."""


def _shard(
    parts: list[Part], holding: Holding, units: Blocks, shard: Shard, frees: bool
) -> tuple[nn.Module | None, list[str]]:
    """Hand each stage to FSDP2; what stages share, on this rank or across ranks, becomes a unit of its own."""
    doubled = sorted(holding.doubled & set(holding.parameters))
    unit: nn.Module | None = None
    notices: list[str] = []
    if doubled:
        owners = {id(s.module): s.module for name in doubled for s in holding.parameters[name]}
        unit = SharedUnit()
        for index, owner in enumerate(owners.values()):
            unit.add_module(str(index), owner)
        others = {p for name, p in holding.named_parameters().items() if name not in holding.doubled}
        shard(unit, [], others, False)
        assert isinstance(unit, FSDPModule)
        unit()  # FSDP2 prepares a root in its first forward pass
        unit.reshard()
    shared = {holding.parameters[name][0].tensor() for name in doubled}
    for part in parts:
        inside = {id(module) for module in part.modules()}
        own = [(n, m) for n, m in units if id(m) in inside and not shared.issuperset(m.parameters())]
        notices += [line for line in shard(part, own, shared, frees) if line not in notices]
    return unit, notices


def _across(plan: Plan) -> dict[str, list[int]]:
    """Of the whole model: parameter → the pipeline ranks that use it, where there are several."""
    found = {}
    for name, users in plan.model.users.items():
        ranks = sorted({plan.parts.ranks[plan.stage_of[user]] for user in users})
        if len(ranks) > 1:
            found[name] = ranks
    return found


def _data_parallel(layout: Layout, mesh: DeviceMesh) -> tuple[int, dist.ProcessGroup | None]:
    """Which of the pipelines side by side this rank is in, and the group of the ranks with the same stages."""
    column = mesh["replicate"].get_local_rank() * layout.shard + mesh["shard"].get_local_rank()
    mine = None
    for ranks in mesh.mesh.flatten(1).tolist():  # every rank makes every group
        made = dist.new_group(ranks) if layout.data_parallel_size > 1 else None
        if dist.get_rank() in ranks:
            mine = made
    return column, mine
