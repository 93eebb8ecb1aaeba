"""Predicts the memory of a pipeline's ranks.

The passes of each stage are rehearsed once, and repeated in the order of the schedule.

The rank's stages are placed as in training, and the executor of training runs two micro-batches
through each. The first pass gathers parameters or creates gradients, all later ones are equal. The
schedule's list of actions then gives the micro-batches in flight. Where it has a backward pass in
two halves, these run, too, after all else: together they may cost more than the pass at once, which
computes once what both need.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lockstep.config import Config
from lockstep.costs.hardware import Cost
from lockstep.costs.steps import ScheduledPass
from lockstep.data.batches import MicroBatch, assign_strided
from lockstep.layout import Layout
from lockstep.models.chain import lent, run_segment
from lockstep.models.protocol import blocks_of
from lockstep.parallel.axes.expert import ExpertAxis
from lockstep.parallel.execution.executor import Executor, Stage
from lockstep.parallel.execution.passes import MicroBatchPass
from lockstep.parallel.execution.programs import Message
from lockstep.parallel.execution.transport import Meta, Metas, Rehearsed, Tensors
from lockstep.parallel.expert import PlacedExperts
from lockstep.parallel.facts import facts_of
from lockstep.parallel.loss_accumulator import Loss
from lockstep.parallel.pipeline.placing import LocalStages, around_stage, local_stages
from lockstep.parallel.pipeline.plan import PipelinePlan, plan_of, splits_backward
from lockstep.parallel.pipeline.schedules import actions
from lockstep.parallel.pipeline.stage_module import StageCall, StageModule
from lockstep.parallel.pipeline.stage_parameters import survey
from lockstep.parallel.site import DryRun, Site
from lockstep.plan import rehearsal
from lockstep.plan.rehearsal import CPU, GROUPED, Rehearsal, Work
from lockstep.plan.tracker import (
    KINDS,
    Region,
    Tracker,
    mark_blocks,
    peak_over,
    regions_of,
    tag_gradients,
)
from lockstep.plan.workload import REPEATED, Workload, block_description, kept_blocks
from lockstep.torch_compat.fake_tensors import FakeTensorMode
from lockstep.torch_compat.fsdp_state import reduce_gradients

# (kind of action, stage, whether it is the first of its kind on this rank) → its changes and cost
Changes = dict[tuple[str, int, bool], Region]


def rehearse_rank(
    work: Workload,
    config: Config,
    layout: Layout,
    rank: int,
    *,
    micro_batches: int,
    device_type: str = "cuda",
) -> Rehearsal:
    """Rehearse a step of one pipeline rank, with `micro_batches` of a data-parallel rank."""
    layout = layout.with_few_replicas()  # further ones change nothing
    on = _PipelineRank(work, config, layout, rank, device_type)
    short = _shortened(on)
    plan = short.plan
    pipeline = config.distributed.pipeline
    count = plan.facts.padded(
        pipeline.n_microbatches or micro_batches, layout.pipeline, len(plan.parts.stages)
    )
    order = actions(pipeline.schedule, layout.pipeline, pipeline.stages_per_rank, count)[rank]
    with rehearsal.fake_ranks(layout.world_size, rank * layout.world_size // layout.pipeline):
        mesh = rehearsal.meshes(layout)
        assert mesh is not None
        metas = _metas(on, short, mesh)
        with rehearsal.tracked() as tracker:
            changes, start = _rehearse_step(on, short, tracker, metas, mesh)
            grown = sum(start) / max(1, sum(tracker.start))
    stages = {stage: _work_of(changes, stage) for stage in plan.parts.of_rank(rank)}
    update = changes["update", 0, True].cost
    total = Work(Cost(), Cost(), update._replace(moved=round(update.moved * grown)))
    for of_stage in stages.values():
        total = replace(
            total,
            forward=total.forward.plus(of_stage.forward),
            backward=total.backward.plus(of_stage.backward),
        )
    sent = [
        sum(math.prod(meta.shape) * meta.dtype.itemsize for meta in outputs) for outputs in metas
    ]
    peak = peak_over(start, _in_schedule_order(order, changes))
    return Rehearsal(peak, dict(zip(KINDS, start, strict=True)), total, stages, sent)


def _work_of(changes: Changes, stage: int) -> Work:
    """Return the costs of a stage's passes, of which the first of each kind is left out."""
    forward, backward = (
        changes[kind, stage, False].cost.with_sent_of(
            [changes[kind, stage, first].cost for first in (True, False)]
        )
        for kind in ("F", "B")
    )
    if ("I", stage, False) not in changes:
        return Work(forward, backward, Cost())
    return Work(
        forward,
        backward,
        Cost(),
        (changes["I", stage, False].cost, changes["W", stage, False].cost),
    )


@dataclass(frozen=True)
class _PipelineRank:
    """The rank whose step is rehearsed, and the run that it is one of."""

    work: Workload
    config: Config
    layout: Layout
    rank: int  # along the pipeline
    device_type: str

    def batch(self) -> Any:
        """Return a micro-batch, without values."""
        return self.work.batch(self.config.training.batch_size)


@dataclass(frozen=True)
class _Shortened:
    """A model on meta with all stages of the full one, and fewer equal blocks in each stage."""

    model: nn.Module
    plan: PipelinePlan
    # stage → index, among the copy's blocks, of the one that is repeated for those left out
    repeated: dict[int, int]
    left_out: dict[int, int]  # stage → number of blocks left out


def _shortened(on: _PipelineRank) -> _Shortened:
    """Leave blocks out of each stage.

    This rank's stages, which compute, keep as many as its device needs, and the others keep one.
    """
    work = on.work
    config = on.config
    ranks = on.layout.pipeline
    plan = plan_of(work.facts, ranks, config.step)
    most = kept_blocks(on.device_type)
    place_of = {name: position for position, name in enumerate(work.equal_blocks)}
    kept: list[int] = []
    spans: list[range] = []
    repeated: dict[int, int] = {}
    left_out: dict[int, int] = {}
    for stage, span in enumerate(plan.parts.stages):
        names = [plan.segments[index][0] for index in span]
        blocks = [place_of[name] for name in names if name in place_of]
        keeps = most if plan.parts.ranks[stage] == on.rank else 1
        if len(blocks) > keeps + 1:
            repeated[stage] = len(kept) + REPEATED
            left_out[stage] = len(blocks) - keeps
            blocks = blocks[:keeps]
        kept += blocks
        begin = spans[-1].stop if spans else 0
        spans.append(range(begin, begin + len(names) - left_out.get(stage, 0)))
    alike = config.training.gradient_checkpointing not in GROUPED
    short = work.with_blocks(kept) if alike and left_out else None
    facts = None if short is None else facts_of(short)
    if short is None or facts is None or len(facts.required_chain()) != spans[-1].stop:
        model = work.model()
        return _Shortened(model, plan_of(facts_of(model), ranks, config.step), {}, {})
    parts = replace(plan.parts, stages=tuple(spans))
    plan = PipelinePlan(survey(facts), facts.required_chain(), plan.facts, parts)
    return _Shortened(short, plan, repeated, left_out)


def _in_schedule_order(order: Sequence[ScheduledPass], changes: Changes) -> list[Region]:
    """Return the changes in schedule order.

    For a backward pass in two halves, the second frees the memory.
    """
    seen: set[tuple[str, int]] = set()
    regions = [changes["start", 0, True]]
    for action in order:
        if action.kind == "I":
            continue
        key = ("F" if action.kind == "F" else "B", action.stage)
        regions.append(changes[*key, key not in seen])
        seen.add(key)
    return [*regions, changes["update", 0, True]]


def _metas(on: _PipelineRank, short: _Shortened, mesh: DeviceMesh) -> list[Metas]:
    """Return the outputs of each stage, without values, from a copy of the model.

    Equal segments run once.
    """
    config = on.config
    layout = on.layout
    model = copy.deepcopy(short.model)
    # FSDP2 gathers parameters so
    if config.precision.param_dtype == "bf16" and layout.data_parallel_size > 1:
        model.to(torch.bfloat16)
    outputs_of_stages: list[Metas] = []
    known: dict[tuple[str, Metas], Any] = {}
    with FakeTensorMode(allow_non_fake_inputs=True), rehearsal.precision_of(config).autocast():
        model.to_empty(device=CPU)
        facts = on.work.facts_of(model)
        site = rehearsal.prepared_site(facts, layout, config, DryRun(mesh, "cpu"))
        inputs = values, keywords = site.objective.inputs(on.batch())
        for stage in short.plan.parts.stages:
            for name, segment in facts.required_chain()[stage.start : stage.stop]:
                key = (block_description(segment), tuple(Meta.of(value) for value in values))
                if key not in known:
                    known[key] = run_segment(
                        segment,
                        values,
                        keywords | lent(model, facts.borrowed.get(name, {})),
                        inputs,
                    )
                values = known[key] if isinstance(known[key], tuple) else (known[key],)
                keywords = {}
            outputs_of_stages.append(tuple(Meta.of(value) for value in values))
    return outputs_of_stages


@dataclass(frozen=True)
class _PlacedStages:
    """The rank's stages, placed as in training, with their parameters and the optimizer's."""

    site: Site
    local: LocalStages
    experts: PlacedExperts | None  # among the parameters, if they are spread over ranks
    own: dict[str, nn.Parameter]  # by name
    # Parameter → what the optimizer takes for it: for experts a DTensor of all of them, else the
    # parameter itself. The optimizer takes DTensors or plain tensors, not both.
    trained: dict[nn.Parameter, nn.Parameter]

    def hand_over_expert_gradients(self) -> None:
        """Move the gradients of experts to what the optimizer takes for them."""
        for name, parameter in self.own.items():
            trained = self.trained[parameter]
            if trained is not parameter and parameter.grad is not None:
                assert self.experts is not None
                trained.grad = self.experts.whole(name, parameter.grad)
                parameter.grad = None


def _rehearse_step(
    on: _PipelineRank,
    short: _Shortened,
    tracker: Tracker,
    metas: list[Metas],
    mesh: DeviceMesh,
) -> tuple[Changes, tuple[int, ...]]:
    """Run two micro-batches through each stage of the rank, and an update.

    Return the changes, and the bytes by kind before the step.
    """
    batch = on.batch()
    mark_blocks(tracker, blocks_of(short.model))
    placed = _place_stages(on, short, tracker, mesh)
    local = placed.local
    tag_gradients(tracker, placed.own.values())
    taken = {name: placed.trained[parameter] for name, parameter in placed.own.items()}
    optimizer = rehearsal.optimizer_of(on.config, taken, placed.site.facts.blocks)
    executor = _executor(placed.site, local, batch, metas)
    passes = _Passes(tracker, short, executor, batch)
    rehearsal.fill_state(optimizer)
    held = [*placed.own.values(), *local.held.named_buffers().values()]
    rehearsal.tag_persistent(tracker, held, optimizer)

    tracker.restart()
    for module in local.unit.modules() if local.unit is not None else ():
        if isinstance(module, FSDPModule):
            module.unshard()
    passes.close("start")
    for part in local.parts:
        passes.run("F", part.index)
    for part in reversed(local.parts):
        passes.run("B", part.index)
    executor.after_step(2)
    if local.unit is not None:
        reduce_gradients(local.unit, begun=False)
    placed.hand_over_expert_gradients()
    rehearsal.update(optimizer)
    passes.close("update")

    start = _with_blocks_left_out(tracker.start, on, short, placed, optimizer)
    plan = short.plan
    if plan.facts.splits_backward:
        together, _ = splits_backward(plan, plan.uses(), on.config.step)
        for part in reversed(local.parts):
            passes.measure_halves(part.index, apart=together)
    return passes.changes, start


def _place_stages(
    on: _PipelineRank, short: _Shortened, tracker: Tracker, mesh: DeviceMesh
) -> _PlacedStages:
    """Place the rank's stages as in training, without values."""
    dry_run = rehearsal.dry_run_of(tracker, mesh, on.device_type)
    facts = on.work.facts_of(short.model)
    site = rehearsal.prepared_site(facts, on.layout, on.config, dry_run)
    local = local_stages(site, mesh["pipeline"], short.plan)
    own = local.held.named_parameters()
    expert = site.axis(ExpertAxis)
    experts = None if expert is None else expert.held
    trained = {parameter: parameter for parameter in own.values()}
    for name, parameter in own.items():
        if experts is not None and name in experts.shapes:
            every_expert = experts.whole(name, parameter.detach())
            trained[parameter] = nn.Parameter(every_expert, parameter.requires_grad)
    return _PlacedStages(site, local, experts, own, trained)


def _with_blocks_left_out(
    start: tuple[int, ...],
    on: _PipelineRank,
    short: _Shortened,
    placed: _PlacedStages,
    optimizer: torch.optim.Optimizer,
) -> tuple[int, ...]:
    """Return the bytes by kind before a step of the full model's stages."""
    states: dict[Tensor, Any] = {
        parameter: optimizer.state[trained] for parameter, trained in placed.trained.items()
    }
    for stage, left_out in short.left_out.items():
        if short.plan.parts.ranks[stage] == on.rank:
            block = placed.site.facts.blocks[short.repeated[stage]][1]
            start = rehearsal.with_blocks_left_out(start, block, states, left_out)
    return start


@dataclass
class _Passes:
    """Runs passes of a rank's stages one by one, and keeps what each of them changes and costs."""

    tracker: Tracker
    short: _Shortened
    executor: Executor
    batch: Any
    changes: Changes = field(default_factory=dict)
    # (stage, position)
    _passing: dict[tuple[int, int], MicroBatchPass] = field(default_factory=dict)
    # (kind, stage) → cost, without blocks left out
    _without: dict[tuple[str, int], Cost] = field(default_factory=dict)

    def run(self, kind: str, stage: int) -> None:
        """Run a kind of pass of two micro-batches through a stage."""
        for position in range(2):
            if kind == "F":
                micro_batch = MicroBatch(position, self.batch)
                new = MicroBatchPass(
                    micro_batch, 2, 1.0, last=False, stage=stage, position=position
                )
                self._passing[stage, position] = new
            passing = (
                self._passing[stage, position]
                if kind in ("F", "I")
                else self._passing.pop((stage, position))
            )
            self.executor.alone(passing, kind)
            if kind == "F":
                self.tracker.tag([*passing.inputs, *passing.outputs], "stashes")
            del passing
            self.close(kind, stage, first=position == 0)

    def close(self, kind: str, stage: int = 0, *, first: bool = True) -> None:
        """Keep what has happened since the last call as an action."""
        items = self.tracker.take_items()
        labels = (f"{kind}{self.short.repeated.get(stage, 0)}",) if kind in ("F", "B") else ()
        self._without[kind, stage] = _joined(regions_of(items, (), 0)).cost
        self.changes[kind, stage, first] = _joined(
            regions_of(items, labels, self.short.left_out.get(stage, 0))
        )

    def measure_halves(self, stage: int, *, apart: bool) -> None:
        """Run the two halves of a backward pass; where they do not run `apart`, the first does all.

        Blocks that are left out cost as much more, relative to the pass at once, as those that run.
        """
        at_once = self._without["B", stage]
        at_once_in_full = self.changes["B", stage, False]
        if not apart:
            self.changes["I", stage, False] = at_once_in_full
            self.changes["W", stage, False] = Region("", [], Cost())
            return
        for kind in ("F", "I", "W"):
            self.run(kind, stage)
        for kind in ("I", "W"):
            scaled = self._without[kind, stage].grown(at_once, at_once_in_full.cost)
            self.changes[kind, stage, False] = self.changes[kind, stage, False]._replace(
                cost=scaled
            )


def _joined(regions: Sequence[Region]) -> Region:
    joined = Region("", [], Cost())
    for region in regions:
        joined.changes.extend(region.changes)
        joined = joined._replace(cost=joined.cost.plus(region.cost))
    return joined


def _executor(site: Site, local: LocalStages, batch: Any, metas: list[Metas]) -> Executor:
    """Return the executor of a rank's stages, to which other ranks send tensors without values."""

    def finish(outputs: Any, _calls: object) -> Loss:
        return Loss(site.objective.summed(outputs, batch), 1, 0)

    def run(part: StageModule, _micro_batch: MicroBatch, received: Tensors) -> Any:
        return part(StageCall(site.objective.inputs(batch), finish), *received)

    def sent(message: Message) -> Metas:
        if message.kind == "F":
            return metas[message.stage - 1]
        return tuple(meta.as_gradient() for meta in metas[message.stage] if meta.requires_grad)

    stages = [
        Stage(
            partial(run, part),
            around_stage(site, local, part, assign_strided),
            part.index,
            len(local.plan.parts.stages),
        )
        for part in local.parts
    ]
    return Executor(stages, site.random_state, Rehearsed(CPU, sent))
