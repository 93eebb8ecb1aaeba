"""Predicts the memory of a pipeline's ranks: each stage's passes are rehearsed once, and repeated in schedule order.

The rank's stages are placed and run as in training (torch's stage with our sends and receives, FSDP2 under it), for two
micro-batches, and the changes of each pass are recorded. The first pass gathers parameters or creates gradients, all
later ones are equal. The schedule's list of actions then gives the micro-batches in flight.
"""

import copy
import math
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
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
from lockstep.models.protocol import Objective, blocks_of, require_segments
from lockstep.parallel.pipeline.place import local_stages
from lockstep.parallel.pipeline.plan import PipelinePlan, plan_of
from lockstep.parallel.pipeline.schedules import actions
from lockstep.parallel.pipeline.stage_parameters import survey
from lockstep.parallel.pipeline.torch_stage import Meta, Metas, Stage, reduce_gradients
from lockstep.parallel.place import prepared
from lockstep.parallel.placement import DryRun
from lockstep.plan.rehearsal import (
    CPU,
    GROUPED,
    Rehearsal,
    Work,
    dry_run_of,
    fake_ranks,
    fill_state,
    meshes,
    optimizer_of,
    planned,
    precision_of,
    tag_persistent,
    update,
    with_blocks_left_out,
    with_few_replicas,
)
from lockstep.plan.tracker import (
    KINDS,
    EqualChunks,
    Record,
    Region,
    Tracker,
    join_regions,
    mark_blocks,
    peak_over,
    repeated,
    tag_gradients,
)
from lockstep.plan.workload import REPEATED, Workload, block_description, kept_blocks
from lockstep.strategy import strategy_named
from lockstep.torch_compat.fake_tensors import FakeTensorMode

Changes = dict[tuple[str, int, bool], Region]
"""(kind of action, stage, whether it is the first of its kind on this rank) → its changes and cost."""


def rehearse_rank(
    work: Workload, config: Config, layout: Layout, rank: int, *, micro_batches: int, device_type: str = "cuda"
) -> Rehearsal:
    """Rehearse a step of one pipeline rank, with `micro_batches` of a data-parallel rank."""
    layout = with_few_replicas(layout)
    cut = _shortened(work, config, layout, rank, kept_blocks(device_type))
    model, plan = cut.model, cut.plan
    objective = work.objective(model)
    pipeline = config.distributed.pipeline
    count = plan.facts.padded(pipeline.n_microbatches or micro_batches, layout.pipeline, len(plan.parts.stages))
    order = actions(pipeline.schedule, layout.pipeline, pipeline.stages_per_rank, count)[rank]
    with fake_ranks(layout.world_size, rank * layout.world_size // layout.pipeline), ExitStack() as modes:
        mesh = meshes(layout)
        assert mesh is not None
        group = mesh["pipeline"].get_group()
        metas = _metas(copy.deepcopy(model), work, config, plan, layout, mesh)
        fake = modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        modes.enter_context(EqualChunks())
        tracker = modes.enter_context(Tracker(fake))
        holder = _Rank(tracker, cut, work, config, layout, objective, metas, group, rank, mesh, device_type)
        changes = holder.step()
        start = holder.start()
        grown = sum(start) / max(1, sum(tracker.record.start))
    persistent = dict(zip(KINDS, start, strict=True))
    stages = {
        stage: Work(changes["F", stage, False].cost, changes["B", stage, False].cost, Cost())
        for stage in plan.parts.of_rank(rank)
    }
    whole = Cost(), Cost()
    for work_of_stage in stages.values():
        whole = whole[0].plus(work_of_stage.forward), whole[1].plus(work_of_stage.backward)
    update_cost = changes["update", 0, True].cost
    in_all = Work(*whole, update_cost._replace(moved=round(update_cost.moved * grown)))
    sent = [sum(_bytes(meta) for meta in metas[stage]) for stage in range(len(metas))]
    return Rehearsal(peak_over(start, _in_schedule_order(order, changes)), persistent, in_all, stages, sent)


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


def _bytes(meta: Meta) -> int:
    return math.prod(meta.shape) * meta.dtype.itemsize


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
    """Return the outputs of each stage: one forward pass through the chain, in which equal segments run once.

    Args:
        model: on meta; it is changed.
    """
    if config.precision.param_dtype == "bf16" and layout.data_parallel_size > 1:  # FSDP2 gathers parameters so
        model.to(torch.bfloat16)
    found: list[Metas] = []
    known: dict[tuple[str, Metas], Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), precision_of(config).autocast():
        model.to_empty(device=CPU)
        placement = prepared(
            model, strategy_named(layout.strategy), layout, planned(config.step), work.objective(model), CPU,
            precision_of(config), DryRun(mesh, "cpu"),
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


@dataclass
class _Rank:
    """The stages of a rank, built on fake tensors."""

    tracker: Tracker
    cut: _Shortened
    work: Workload
    config: Config
    layout: Layout
    objective: Objective
    metas: list[Metas]
    group: dist.ProcessGroup
    rank: int
    mesh: Any
    device_type: str

    def __post_init__(self) -> None:
        config, plan, model = self.config, self.cut.plan, self.cut.model
        self.batch = self.work.batch(config.training.batch_size)
        mark_blocks(self.tracker, blocks_of(model))
        placement = prepared(
            model, strategy_named(self.layout.strategy), self.layout, planned(config.step), self.objective, CPU,
            precision_of(config), dry_run_of(self.tracker, self.mesh, self.device_type),
        )  # fmt: skip
        here = local_stages(placement, self.mesh, plan)
        here.work.inputs = lambda: placement.objective.inputs(self.batch)
        here.work.finish = lambda outputs: placement.objective.summed(outputs, self.batch)
        self.parts, self.unit, held = here.parts, here.unit, here.held
        blocks = placement.blocks
        own, experts = held.named_parameters(), placement.experts
        self.parameters, self.held, self.blocks, self.experts = list(own.values()), held, blocks, experts
        # The optimizer takes DTensors or plain tensors, not both.
        self.trained = {
            parameter: parameter if experts is None or name not in experts.shapes
            else nn.Parameter(experts.whole(name, parameter.detach()), parameter.requires_grad)
            for name, parameter in own.items()
        }  # fmt: skip
        tag_gradients(self.tracker, self.parameters)
        self.optimizer = optimizer_of(config, list(self.trained.values()))
        self.stages = [
            Stage(part, part.index, len(plan.parts.stages), CPU, self.group,
                  forward_at=lambda _s, _p: nullcontext(), backward_at=lambda _s, _p: nullcontext())
            for part in self.parts
        ]  # fmt: skip

    def step(self) -> Changes:
        """Run two micro-batches through each stage, forward in order, backward in reverse; return the changes."""
        tracker, changes = self.tracker, Changes()
        fill_state(self.optimizer)
        tag_persistent(tracker, [*self.parameters, *self.held.named_buffers().values()], self.optimizer)
        tracker.restart()

        def cut(kind: str, stage: int, first: bool) -> None:
            place, times = self.cut.repeated.get(stage, 0), self.cut.left_out.get(stage, 0)
            labels = (f"{kind}{place}",) if kind in ("F", "B") else ()
            regions = repeated(Record(tracker.record.items).regions(), labels, times)
            changes[kind, stage, first] = join_regions(f"{kind}{stage}", regions)
            tracker.record.items = []

        if self.unit is not None:
            for module in self.unit.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
        cut("start", 0, True)
        losses: dict[int, Tensor] = {}
        for stage in self.stages:
            received = () if stage.is_first else self.metas[stage.stage_index - 1]
            sent = () if stage.is_last else self.metas[stage.stage_index]
            stage.begin([received] * 2, [sent] * 2, reduces=True)
        for stage in self.stages:
            for place in range(2):
                stage.get_fwd_recv_ops(place)
                out = stage.forward_one_chunk(place, ())
                if stage.is_last:
                    losses[place] = out
                del out
                tracker.tag([*stage._inputs[place], *stage._outputs[place]], "stashes")
                cut("F", stage.stage_index, place == 0)
        for stage in reversed(self.stages):
            for place in range(2):
                stage.get_bwd_recv_ops(place)
                stage.backward_one_chunk(place, loss=losses.pop(place, None), last_backward=False)
                stage.get_bwd_send_ops(place)
                cut("B", stage.stage_index, place == 0)
        for stage in self.stages:
            if self.layout.data_parallel_size > 1:
                stage.perform_reduce_grad(1)
        if self.unit is not None:
            reduce_gradients(self.unit)
        for name, parameter in self.held.named_parameters().items():
            trained = self.trained[parameter]
            if trained is not parameter and self.experts is not None and parameter.grad is not None:
                trained.grad, parameter.grad = self.experts.whole(name, parameter.grad), None
        update(self.optimizer)
        cut("update", 0, True)
        return changes

    def start(self) -> tuple[int, ...]:
        """Return live bytes by kind before the step, including blocks that were left out."""
        found = self.tracker.record.start
        for stage in self.cut.plan.parts.of_rank(self.rank):
            if stage in self.cut.left_out:
                block = self.blocks[self.cut.repeated[stage]][1]
                states: dict[Tensor, Any] = {one: self.optimizer.state[other] for one, other in self.trained.items()}
                found = with_blocks_left_out(found, block, states, self.cut.left_out[stage])
        return found
