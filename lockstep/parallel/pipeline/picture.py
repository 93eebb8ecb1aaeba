"""Schedules as text: what each rank computes when, and the share of the time in which ranks wait.

The order of passes is torch's, as it runs them; the times are calculated here, sending taking none. Theory: with p
ranks, m micro-batches and V stages a rank, ranks wait (p-1)/(V·m+p-1) of the time. What 1F1B saves is memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from lockstep.config import StepConfig, require_equation
from lockstep.costs.steps import ScheduledPass, pipeline
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.schedules import SCHEDULES, actions, rank_of
from lockstep.strategy import AUTO, resolve, strategy_named

UNITS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # a backward pass costs as much as two forward
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
        """Return the largest number of activations (of one micro-batch on one stage) that each rank keeps at a time."""
        change = {"F": 1, "B": -1, "I": 0, "W": -1}
        return [max(accumulate(change[timed.work.kind] for timed in rank)) for rank in self.ranks]


def timeline(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> ScheduleTimeline:
    """Return the run of a schedule over `micro_batches`, padded to a number that it accepts."""
    stages = ranks * stages_per_rank
    count = SCHEDULES[name].padded(micro_batches, ranks, stages)
    seconds = {(kind, stage): cost for kind, cost in UNITS.items() for stage in range(stages)}
    return simulate(actions(name, ranks, stages_per_rank, count), seconds)


def simulate(orders: Sequence[Sequence[ScheduledPass]], seconds: dict[tuple[str, int], float]) -> ScheduleTimeline:
    """Simulate a run of each rank's passes in order, which take (kind, stage) → seconds, and sending no time."""
    holders = dict(sorted((each.stage, rank) for rank, order in enumerate(orders) for each in order))
    line = pipeline(orders, seconds, [0.0] * len(holders), rank_of=list(holders.values()))
    tasks = [[task for task in line.tasks if task.stream == ("compute", rank)] for rank in range(len(orders))]
    return ScheduleTimeline(
        tuple(
            tuple(Timed(each, task.begin, task.end) for each, task in zip(order, done, strict=True))
            for order, done in zip(orders, tasks, strict=True)
        )
    )


def picture_of(config: StepConfig, ranks: int | None = None) -> str:
    """Return `picture` of one run of a config's schedule; on as many ranks as its sizes multiply to, or two."""
    distributed, training = config.distributed, config.training
    kind = distributed.pipeline
    if distributed.strategy == AUTO or not strategy_named(distributed.strategy).splits_model:
        raise UsageError(
            f"strategy {distributed.strategy} has no schedule", where="distributed.strategy", fix="write pipeline"
        )
    named = (distributed.pipeline_size or 2) * (distributed.replicate_size or 1) * (distributed.shard_size or 1)
    layout = resolve(distributed, ranks or named)
    micro_batches = training.accumulation
    if training.global_batch_size is not None:
        require_equation(training, layout.batch_shares)
        micro_batches = -(-training.global_batch_size // (training.batch_size * layout.data_parallel_size))
    of_a_run = min(micro_batches, kind.n_microbatches or micro_batches)
    return picture(kind.schedule, layout.pipeline, kind.stages_per_rank, of_a_run)


def picture(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> str:
    """Return a schedule as text: a line per rank, time to the right, one column for each forward pass's time."""
    run = timeline(schedule, ranks, stages_per_rank, micro_batches)
    facts = SCHEDULES[schedule]
    count = facts.padded(micro_batches, ranks, ranks * stages_per_rank)
    laps = stages_per_rank > 1
    width = len(str(count - 1)) + 1 + laps
    left = len(f"rank {ranks - 1}  ")
    shown = min(int(run.end), (_COLUMNS - left) // (width + 1))
    kinds = "F forward, B backward, twice as long"
    if facts.splits_backward:
        kinds += "; I of inputs, W of weights, half a backward each"
    each = f" × {stages_per_rank} stages" if laps else ""
    extra = f", filled up to {count} with copies of no weight" if count > micro_batches else ""
    lines = [f"{facts.name}, {ranks} ranks{each}, {micro_batches} micro-batches{extra} ({kinds})"]
    for rank, done in enumerate(run.ranks):
        cells = ["·".ljust(width)] * int(run.end)
        for timed in done:
            lap = chr(ord("a") + timed.work.stage // ranks) if laps else ""
            text = f"{timed.work.kind}{lap}{timed.work.micro_batch}".ljust(width)
            for column in range(int(timed.start), int(timed.end)):
                cells[column] = text
        lines.append(f"rank {rank}".ljust(left) + " ".join(cells[:shown]).rstrip())
    if shown < run.end:
        lines.append(f"(the first {shown} of {run.end:.0f} columns)")
    if laps:
        stages = ranks * stages_per_rank
        held = [
            f"{rank}: {', '.join(str(s) for s in range(stages) if rank_of(s, ranks, v_shaped=facts.v_shaped) == rank)}"
            for rank in range(ranks)
        ]
        lines.append(f"stages of rank {'; '.join(held)} (a, b … from the first to the last)")
    theory = ""
    if not facts.splits_backward:
        times = f"{stages_per_rank}·" if laps else ""
        theory = f" = (p-1)/({times}m+p-1) = {ranks - 1}/{stages_per_rank * count + ranks - 1}"
    lines.append(f"bubble: ranks wait {run.bubble:.1%} of the time{theory}")
    lines.append(f"kept at most: {', '.join(map(str, run.kept()))} activations of a micro-batch, by rank")
    return "\n".join(lines)
