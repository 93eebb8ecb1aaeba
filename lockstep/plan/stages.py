"""Predicts the memory of a pipeline's ranks: each stage's passes are rehearsed once, and repeated in schedule order.

The rank's stages are placed and run as in training, for two micro-batches. The first pass gathers parameters or creates
gradients, all later ones are equal. The schedule's list of actions then gives the micro-batches in flight.
"""

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lockstep.config import Config
from lockstep.costs.hardware import Cost
from lockstep.costs.steps import ScheduledPass
from lockstep.layout import Layout
from lockstep.models.chain import lent, run_segment, shared_parameters_of
from lockstep.models.protocol import blocks_of, require_segments
from lockstep.parallel.pipeline.place import local_stages
from lockstep.parallel.pipeline.plan import PipelinePlan, plan_of
from lockstep.parallel.pipeline.schedules import actions
from lockstep.parallel.pipeline.stage_parameters import survey
from lockstep.parallel.pipeline.torch_stage import Meta, Metas, Stage, reduce_gradients
from lockstep.parallel.place import prepared
from lockstep.parallel.placement import DryRun
from lockstep.plan import rehearsal
from lockstep.plan.rehearsal import CPU, GROUPED, Rehearsal, Work
from lockstep.plan.tracker import KINDS, Region, Tracker, mark_blocks, peak_over, regions_of, tag_gradients
from lockstep.plan.workload import REPEATED, Workload, block_description, kept_blocks
from lockstep.strategy import strategy_named
from lockstep.torch_compat.fake_tensors import FakeTensorMode

# (kind of action, stage, whether it is the first of its kind on this rank) → its changes and cost
Changes = dict[tuple[str, int, bool], Region]


def rehearse_rank(
    work: Workload, config: Config, layout: Layout, rank: int, *, micro_batches: int, device_type: str = "cuda"
) -> Rehearsal:
    """Rehearse a step of one pipeline rank, with `micro_batches` of a data-parallel rank."""
    layout = rehearsal.with_few_replicas(layout)
    short = _shortened(work, config, layout, rank, kept_blocks(device_type))
    plan = short.plan
    pipeline = config.distributed.pipeline
    count = plan.facts.padded(pipeline.n_microbatches or micro_batches, layout.pipeline, len(plan.parts.stages))
    order = actions(pipeline.schedule, layout.pipeline, pipeline.stages_per_rank, count)[rank]
    with rehearsal.fake_ranks(layout.world_size, rank * layout.world_size // layout.pipeline):
        mesh = rehearsal.meshes(layout)
        assert mesh is not None
        group = mesh["pipeline"].get_group()
        metas = _metas(copy.deepcopy(short.model), work, config, plan, layout, mesh)
        with rehearsal.tracked() as tracker:
            changes, start = _run(tracker, short, work, config, layout, rank, metas, group, mesh, device_type)
            grown = sum(start) / max(1, sum(tracker.start))
    stages = {
        stage: Work(changes["F", stage, False].cost, changes["B", stage, False].cost, Cost())
        for stage in plan.parts.of_rank(rank)
    }
    update = changes["update", 0, True].cost
    in_all = Work(Cost(), Cost(), update._replace(moved=round(update.moved * grown)))
    for one in stages.values():
        in_all = replace(in_all, forward=in_all.forward.plus(one.forward), backward=in_all.backward.plus(one.backward))
    sent = [sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in of_stage) for of_stage in metas]
    peak = peak_over(start, _in_schedule_order(order, changes))
    return Rehearsal(peak, dict(zip(KINDS, start, strict=True)), in_all, stages, sent)


@dataclass(frozen=True)
class _Shortened:
    """A model on meta with the stages of the whole one, in which stages have fewer of its equal blocks."""

    model: nn.Module
    plan: PipelinePlan
    repeated: dict[int, int]  # stage → index, among the copy's blocks, of the one that is repeated for those left out
    left_out: dict[int, int]  # stage → number of blocks left out


def _shortened(work: Workload, config: Config, layout: Layout, rank: int, most: int) -> _Shortened:
    """Leave blocks out of each stage: this rank's, which compute, keep `most` each, and the others one."""
    plan = plan_of(work.description, layout.pipeline, config.step)
    place_of = {name: place for place, name in enumerate(work.equal_blocks)}
    kept: list[int] = []
    spans: list[range] = []
    repeated: dict[int, int] = {}
    left_out: dict[int, int] = {}
    for stage, span in enumerate(plan.parts.stages):
        names = [plan.segments[index][0] for index in span]
        blocks = [place_of[name] for name in names if name in place_of]
        keeps = most if plan.parts.ranks[stage] == rank else 1
        if len(blocks) > keeps + 1:
            repeated[stage], left_out[stage] = len(kept) + REPEATED, len(blocks) - keeps
            blocks = blocks[:keeps]
        kept += blocks
        begin = spans[-1].stop if spans else 0
        spans.append(range(begin, begin + len(names) - left_out.get(stage, 0)))
    alike = config.training.gradient_checkpointing not in GROUPED
    short = work.with_blocks(kept) if alike and left_out else None
    if short is None or len(segments := require_segments(short)) != spans[-1].stop:
        model = work.model()
        return _Shortened(model, plan_of(model, layout.pipeline, config.step), {}, {})
    parts = replace(plan.parts, stages=tuple(spans))
    return _Shortened(short, PipelinePlan(survey(short, segments), segments, plan.facts, parts), repeated, left_out)


def _in_schedule_order(order: Sequence[ScheduledPass], changes: Changes) -> list[Region]:
    """Return the changes in schedule order. For a backward pass in two halves, the second frees the memory."""
    seen: set[tuple[str, int]] = set()
    regions = [changes["start", 0, True]]
    for action in order:
        if action.kind == "I":
            continue
        key = ("F" if action.kind == "F" else "B", action.stage)
        regions.append(changes[*key, key not in seen])
        seen.add(key)
    return [*regions, changes["update", 0, True]]


def _metas(
    model: nn.Module, work: Workload, config: Config, plan: PipelinePlan, layout: Layout, mesh: DeviceMesh
) -> list[Metas]:  # fmt: skip
    """Return the outputs of each stage of a model on meta, which is changed; equal segments run once."""
    if config.precision.param_dtype == "bf16" and layout.data_parallel_size > 1:  # FSDP2 gathers parameters so
        model.to(torch.bfloat16)
    found: list[Metas] = []
    known: dict[tuple[str, Metas], Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), rehearsal.precision_of(config).autocast():
        model.to_empty(device=CPU)
        placement = prepared(
            model, strategy_named(layout.strategy), layout, rehearsal.planned(config.step), work.objective(model),
            CPU, rehearsal.precision_of(config), DryRun(mesh, "cpu"),
        )  # fmt: skip
        segments, shared = require_segments(model), shared_parameters_of(model)
        inputs = values, keywords = placement.objective.inputs(work.batch(config.training.batch_size))
        for stage in plan.parts.stages:
            for name, segment in segments[stage.start : stage.stop]:
                key = (block_description(segment), tuple(Meta.of(value) for value in values))
                if key not in known:
                    known[key] = run_segment(segment, values, keywords | lent(model, shared.get(name, {})), inputs)
                values, keywords = known[key] if isinstance(known[key], tuple) else (known[key],), {}
            found.append(tuple(Meta.of(value) for value in values))
    return found


def _run(
    tracker: Tracker, short: _Shortened, work: Workload, config: Config, layout: Layout, rank: int, metas: list[Metas],
    group: dist.ProcessGroup, mesh: DeviceMesh, device_type: str,
) -> tuple[Changes, tuple[int, ...]]:  # fmt: skip
    """Run two micro-batches through each stage of a rank; return the changes, and the bytes by kind before the step."""
    plan, batch = short.plan, work.batch(config.training.batch_size)
    mark_blocks(tracker, blocks_of(short.model))
    placement = prepared(
        short.model, strategy_named(layout.strategy), layout, rehearsal.planned(config.step),
        work.objective(short.model), CPU, rehearsal.precision_of(config),
        rehearsal.dry_run_of(tracker, mesh, device_type),
    )  # fmt: skip
    here = local_stages(placement, mesh, plan)
    here.work.inputs = lambda: placement.objective.inputs(batch)
    here.work.finish = lambda outputs: placement.objective.summed(outputs, batch)
    own, experts = here.held.named_parameters(), placement.experts
    # The optimizer takes DTensors or plain tensors, not both.
    trained = {
        parameter: parameter if experts is None or name not in experts.shapes
        else nn.Parameter(experts.whole(name, parameter.detach()), parameter.requires_grad)
        for name, parameter in own.items()
    }  # fmt: skip
    tag_gradients(tracker, own.values())
    optimizer = rehearsal.optimizer_of(config, list(trained.values()))
    stages = [
        Stage(part, part.index, len(plan.parts.stages), CPU, group,
              forward_at=lambda _s, _p: nullcontext(), backward_at=lambda _s, _p: nullcontext())
        for part in here.parts
    ]  # fmt: skip
    rehearsal.fill_state(optimizer)
    rehearsal.tag_persistent(tracker, [*own.values(), *here.held.named_buffers().values()], optimizer)
    tracker.restart()
    changes = Changes()

    def close(kind: str, stage: int, first: bool) -> None:
        labels = (f"{kind}{short.repeated.get(stage, 0)}",) if kind in ("F", "B") else ()
        joined = Region("", [], Cost())
        for region in regions_of(tracker.items, labels, short.left_out.get(stage, 0)):
            joined.changes.extend(region.changes)
            joined = joined._replace(cost=joined.cost.plus(region.cost))
        changes[kind, stage, first] = joined
        tracker.items = []

    for module in here.unit.modules() if here.unit is not None else ():
        if isinstance(module, FSDPModule):
            module.unshard()
    close("start", 0, True)
    losses: dict[int, Tensor] = {}
    for stage in stages:
        received = () if stage.is_first else metas[stage.stage_index - 1]
        sent = () if stage.is_last else metas[stage.stage_index]
        stage.begin([0] * 2, [received] * 2, [sent] * 2, reduces=True)
    for stage in stages:
        for place in range(2):
            stage.get_fwd_recv_ops(place)
            out = stage.forward_one_chunk(place, ())
            if stage.is_last:
                losses[place] = out
            del out
            tracker.tag([*stage._inputs[place], *stage._outputs[place]], "stashes")
            close("F", stage.stage_index, place == 0)
    for stage in reversed(stages):
        for place in range(2):
            stage.get_bwd_recv_ops(place)
            stage.backward_one_chunk(place, loss=losses.pop(place, None), last_backward=False)
            stage.get_bwd_send_ops(place)
            close("B", stage.stage_index, place == 0)
    for stage in stages if layout.data_parallel_size > 1 else ():
        stage.perform_reduce_grad(1)
    if here.unit is not None:
        reduce_gradients(here.unit)
    for name, parameter in here.held.named_parameters().items():
        if trained[parameter] is not parameter and experts is not None and parameter.grad is not None:
            trained[parameter].grad, parameter.grad = experts.whole(name, parameter.grad), None
    rehearsal.update(optimizer)
    close("update", 0, True)
    start = tracker.start
    states: dict[Tensor, Any] = {one: optimizer.state[other] for one, other in trained.items()}
    for index in short.left_out:
        if plan.parts.ranks[index] == rank:
            block = placement.blocks[short.repeated[index]][1]
            start = rehearsal.with_blocks_left_out(start, block, states, short.left_out[index])
    return changes, start
