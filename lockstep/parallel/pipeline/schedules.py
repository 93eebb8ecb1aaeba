"""Describes each schedule, lists its passes, and draws it.

A description has the stages per rank, their placement, and the numbers of micro-batches.

A stage that is placed `loop` goes to rank (stage mod ranks); placed `v`, the ranks are walked back
and forth. In a picture sending takes no time. Theory: with p ranks, m micro-batches and V stages a
rank, ranks wait (p-1)/(V·m+p-1) of the time. What 1F1B saves is memory: a rank keeps the
activations of as many micro-batches as there are stages from it to the end.

    >>> print(picture("1F1B", ranks=2, stages_per_rank=1, micro_batches=3))
    1F1B, 2 ranks, 3 micro-batches (F forward, B backward, twice as long)
    rank 0  F0 F1 ·  ·  B0 B0 F2 B1 B1 ·  B2 B2
    rank 1  ·  F0 B0 B0 F1 B1 B1 F2 B2 B2 ·  ·
    bubble: ranks wait 25.0% of the time = (p-1)/(m+p-1) = 1/4
    kept at most: 2, 1 activations of a micro-batch, by rank

A zero-bubble schedule makes a backward pass in two halves. Another rank waits for the gradients of
inputs (I), nobody for those of weights (W), which fill the gaps:

    >>> print(picture("InterleavedZeroBubble", ranks=2, stages_per_rank=2, micro_batches=2))
    InterleavedZeroBubble, 2 ranks × 2 stages, 2 micro-batches (F forward, B backward, twice as
    long; I of inputs, W of weights, half a backward each)
    rank 0  Fa0 Fa1 Fb0 Fb1 ·   Ib0 Wb0 Ib1 Wb1 Ia0 Wa0 Ia1 Wa1
    rank 1  ·   Fa0 Fa1 Fb0 Ib0 Fb1 Ib1 Wb0 Ia0 Wb1 Ia1 Wa0 Wa1
    stages of rank 0: 0, 2; 1: 1, 3 (a, b … from the first to the last)
    bubble: ranks wait 7.7% of the time
    kept at most: 4, 4 activations of a micro-batch, by rank

Tests: tests/parallel/pipeline/test_pipeline_schedules.py,
tests/parallel/pipeline/test_pipeline_plan.py
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

from torch import nn

from lockstep.config import StepConfig, require_equation
from lockstep.costs.steps import ScheduledPass, pipeline
from lockstep.division import ceil_div, round_up
from lockstep.errors import UsageError
from lockstep.parallel.execution.programs import UNITS, Program, programs
from lockstep.strategy import AUTO, resolve, strategy_named


@dataclass(frozen=True)
class ScheduleFacts:
    """The properties of a schedule that are needed before it is built."""

    name: str  # of torch's class, without `Schedule`
    stages_per_rank: int | None = None  # how many it takes; None: any number
    v_shaped: bool = False  # stages are placed back and forth over the ranks, else round and round
    # Gradients of inputs and of weights are computed at different times. FSDP2 must not reshard
    # after a forward pass then: see `contradictions` of the axis `pipeline`.
    splits_backward: bool = False

    def padded(self, count: int, ranks: int, stages: int) -> int:
        """Return the smallest number of micro-batches from `count` up that the schedule takes."""
        if self.name in ("1F1B", "DualPipeV"):
            return max(count, stages)
        if self.name in ("Interleaved1F1B", "InterleavedZeroBubble"):
            return round_up(count, ranks)
        return count


SCHEDULES = {
    facts.name: facts
    for facts in (
        ScheduleFacts("GPipe", stages_per_rank=1),
        ScheduleFacts("1F1B", stages_per_rank=1),
        ScheduleFacts("Interleaved1F1B"),
        ScheduleFacts("LoopedBFS"),
        ScheduleFacts("InterleavedZeroBubble", splits_backward=True),
        ScheduleFacts("ZBVZeroBubble", stages_per_rank=2, v_shaped=True, splits_backward=True),
        ScheduleFacts("DualPipeV", stages_per_rank=2, v_shaped=True, splits_backward=True),
    )
}


def rank_of(stage: int, ranks: int, *, v_shaped: bool) -> int:
    """Return the pipeline rank that holds a stage."""
    lap, position = divmod(stage, ranks)
    return ranks - 1 - position if v_shaped and lap % 2 else position


# Its error message is the whole table of actions, on every rank; the exception itself says what
# went wrong.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


def build(name: str, stages: Sequence[Any], count: int) -> Any:
    """Return torch's schedule of stand-ins for stages, which lists passes and does not run."""
    # they import torch's compiler, which a plan without such a schedule has no use for
    from torch.distributed.pipelining.schedules import (
        PipelineScheduleMulti,
        ScheduleDualPipeV,
        get_schedule_class,
    )

    from lockstep.torch_compat.pipeline_schedules import UnpairedDualPipeV

    kind: Any = get_schedule_class(name)
    kind = UnpairedDualPipeV if kind is ScheduleDualPipeV else kind
    several = issubclass(kind, PipelineScheduleMulti)
    return kind(
        list(stages) if several else stages[0],
        n_microbatches=count,
        loss_fn=lambda output, _target: output,
    )


def actions(name: str, ranks: int, stages_per_rank: int, count: int) -> list[list[ScheduledPass]]:
    """Return what each rank computes in a run, in order. This needs no process group."""
    # torch runs it without a list of actions; the list that it draws is another one
    if name == "1F1B":
        return [_one_forward_one_backward(rank, ranks, count) for rank in range(ranks)]
    stages = ranks * stages_per_rank
    stand_ins = [
        SimpleNamespace(
            num_stages=stages,
            group_size=ranks,
            group_rank=0,
            stage_index=0,
            submod=nn.Module(),
            is_first=True,
            is_last=False,
        )
        for _ in range(stages_per_rank)
    ]
    order = build(name, stand_ins, count).pipeline_order
    return [_passes_of(order[rank]) for rank in range(ranks)]


def _one_forward_one_backward(rank: int, ranks: int, count: int) -> list[ScheduledPass]:
    """Return what a rank computes under 1F1B: forward passes ahead, then backward and forward.

    Rank 0 of 2 with 4 micro-batches has 2 forward passes ahead: F0 F1 B0 F2 B1 F3 B2 B3.
    """
    ahead = min(count, ranks - rank)
    forward = [ScheduledPass("F", rank, i) for i in range(count)]
    backward = [ScheduledPass("B", rank, i) for i in range(count)]
    order = forward[:ahead]
    for before, after in zip(backward, forward[ahead:], strict=False):
        order += [before, after]
    return order + backward[count - ahead :]


def _passes_of(entries: Sequence[Any]) -> list[ScheduledPass]:
    """Return the passes in a rank's list of torch's actions, without its idle times."""
    return [
        ScheduledPass(entry.computation_type.value, entry.stage_index, entry.microbatch_index)
        for entry in entries
        if entry is not None and entry.computation_type.value in ("F", "B", "I", "W")
    ]


@cache
def program_of(name: str, ranks: int, stages_per_rank: int, count: int, rank: int) -> Program:
    """Return a rank's program for a run of `count` micro-batches.

    `count` must be a number that the schedule takes.
    """
    return programs(
        actions(name, ranks, stages_per_rank, count), holders(name, ranks, stages_per_rank)
    )[rank]


@cache
def forward_program_of(
    name: str, ranks: int, stages_per_rank: int, count: int, rank: int
) -> Program:
    """Return a rank's program for the forward passes of `count` micro-batches.

    The schedule `name` places the stages. As many micro-batches as there are ranks go through all
    stages of a rank before the next ones: that fills the pipeline, and bounds what waits to be
    sent. On 2 ranks with stages 0 and 2 on rank 0, 3 micro-batches are F0 F1 of stage 0, F0 F1 of
    stage 2, then F2 of each.
    """
    rank_of_stage = holders(name, ranks, stages_per_rank)
    orders: list[list[ScheduledPass]] = [[] for _ in range(ranks)]
    for begin in range(0, count, ranks):
        window = range(begin, min(begin + ranks, count))
        for stage, holder in enumerate(rank_of_stage):
            orders[holder] += [ScheduledPass("F", stage, each) for each in window]
    return programs(orders, rank_of_stage)[rank]


def holders(name: str, ranks: int, stages_per_rank: int) -> list[int]:
    """Return of each stage the pipeline rank that holds it under a schedule."""
    v_shaped = SCHEDULES[name].v_shaped
    return [rank_of(stage, ranks, v_shaped=v_shaped) for stage in range(ranks * stages_per_rank)]


_COLUMNS = 240  # of text; a schedule that takes more of them is cut off


@dataclass(frozen=True)
class Timed:
    """A pass with its time, in units of a stage's forward pass."""

    work: ScheduledPass
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """A run of a schedule."""

    ranks: tuple[tuple[Timed, ...], ...]  # the passes of each rank, in order

    @property
    def end(self) -> float:
        return max(timed.end for rank in self.ranks for timed in rank)

    @property
    def bubble(self) -> float:
        busy = sum(timed.end - timed.start for rank in self.ranks for timed in rank)
        return 1.0 - busy / (self.end * len(self.ranks))

    def kept(self) -> list[int]:
        """Return the largest number of activations that each rank keeps at a time.

        An activation is of one micro-batch on one stage.
        """
        change = {"F": 1, "B": -1, "I": 0, "W": -1}
        return [max(accumulate(change[timed.work.kind] for timed in rank)) for rank in self.ranks]


def timeline(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> ScheduleTimeline:
    """Return the run of a schedule over `micro_batches`, padded to a number that it accepts."""
    stages = ranks * stages_per_rank
    count = SCHEDULES[name].padded(micro_batches, ranks, stages)
    seconds = {(kind, stage): cost for kind, cost in UNITS.items() for stage in range(stages)}
    return simulate(actions(name, ranks, stages_per_rank, count), seconds)


def simulate(
    orders: Sequence[Sequence[ScheduledPass]], seconds: dict[tuple[str, int], float]
) -> ScheduleTimeline:
    """Simulate a run of each rank's passes in order; sending takes no time.

    `seconds`: (kind, stage) → seconds of a pass.
    """
    rank_of_stage = dict(
        sorted((each.stage, rank) for rank, order in enumerate(orders) for each in order)
    )
    line = pipeline(
        orders, seconds, [0.0] * len(rank_of_stage), rank_of=list(rank_of_stage.values())
    )
    timed_ranks = []
    for rank, order in enumerate(orders):
        tasks = [task for task in line.tasks if task.stream == ("compute", rank)]
        pairs = zip(order, tasks, strict=True)
        timed_ranks.append(tuple(Timed(each, task.begin, task.end) for each, task in pairs))
    return ScheduleTimeline(tuple(timed_ranks))


def picture_of(config: StepConfig, ranks: int | None = None) -> str:
    """Return `picture` of one run of a config's schedule.

    It is drawn for as many ranks as the config's sizes multiply to, or two.
    """
    distributed = config.distributed
    training = config.training
    kind = distributed.pipeline
    if distributed.strategy == AUTO or not strategy_named(distributed.strategy).in_stages:
        what = f"strategy {distributed.strategy} has no schedule"
        raise UsageError(what, where="distributed.strategy", fix="write pipeline")
    named = (
        (distributed.pipeline_size or 2)
        * (distributed.replicate_size or 1)
        * (distributed.shard_size or 1)
    )
    layout = resolve(distributed, ranks or named)
    micro_batches = training.accumulation
    if training.global_batch_size is not None:
        require_equation(training, layout.batch_shares)
        samples = training.batch_size * layout.data_parallel_size  # of one micro-batch on each rank
        micro_batches = ceil_div(training.global_batch_size, samples)
    of_a_run = min(micro_batches, kind.n_microbatches or micro_batches)
    return picture(kind.schedule, layout.pipeline, kind.stages_per_rank, of_a_run)


def picture(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> str:
    """Return a schedule as text: a line per rank, and time to the right.

    One column is the time of one forward pass.
    """
    run = timeline(schedule, ranks, stages_per_rank, micro_batches)
    facts = SCHEDULES[schedule]
    count = facts.padded(micro_batches, ranks, ranks * stages_per_rank)
    laps = stages_per_rank > 1  # stages of a rank are lettered then
    width = len(str(count - 1)) + 1 + laps  # of a cell: F, a letter, the micro-batch
    margin = len(f"rank {ranks - 1}  ")
    shown = min(int(run.end), (_COLUMNS - margin) // (width + 1))
    kinds = "F forward, B backward, twice as long"
    if facts.splits_backward:
        kinds += "; I of inputs, W of weights, half a backward each"
    each = f" × {stages_per_rank} stages" if laps else ""
    extra = f", filled up to {count} with copies of no weight" if count > micro_batches else ""
    lines = [f"{facts.name}, {ranks} ranks{each}, {micro_batches} micro-batches{extra} ({kinds})"]

    for rank, passes in enumerate(run.ranks):
        cells = ["·".ljust(width)] * int(run.end)
        for timed in passes:
            lap = chr(ord("a") + timed.work.stage // ranks) if laps else ""
            text = f"{timed.work.kind}{lap}{timed.work.micro_batch}".ljust(width)
            for column in range(int(timed.start), int(timed.end)):
                cells[column] = text
        lines.append(f"rank {rank}".ljust(margin) + " ".join(cells[:shown]).rstrip())

    if shown < run.end:
        lines.append(f"(the first {shown} of {run.end:.0f} columns)")
    if laps:
        stages_of: list[list[str]] = [[] for _ in range(ranks)]
        for stage, holder in enumerate(holders(schedule, ranks, stages_per_rank)):
            stages_of[holder].append(str(stage))
        held = [f"{rank}: {', '.join(stages)}" for rank, stages in enumerate(stages_of)]
        lines.append(f"stages of rank {'; '.join(held)} (a, b … from the first to the last)")
    times = f"{stages_per_rank}·" if laps else ""
    theory = f" = (p-1)/({times}m+p-1) = {ranks - 1}/{stages_per_rank * count + ranks - 1}"
    theory = "" if facts.splits_backward else theory
    lines.append(f"bubble: ranks wait {run.bubble:.1%} of the time{theory}")
    lines.append(
        f"kept at most: {', '.join(map(str, run.kept()))} activations of a micro-batch, by rank"
    )
    return "\n".join(lines)
