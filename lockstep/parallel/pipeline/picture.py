"""What a schedule looks like: who computes what when, and how much of the time ranks wait.

The lists of actions are torch's, as it runs them; the clock is ours. An action starts when its rank is free and what it
needs is there: a forward pass the one of the stage before, a backward pass the one of the stage behind. Sending takes
no time. Theory: with p ranks, m micro-batches and V stages a rank, GPipe and 1F1B both wait (p-1)/(m+p-1) of the time,
and looped schedules (p-1)/(V·m+p-1). What 1F1B saves is memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.config import StepConfig, require_equation
from lockstep.errors import UsageError
from lockstep.parallel.pipeline.partition import rank_of
from lockstep.parallel.pipeline.schedules import ScheduleFacts, facts_of
from lockstep.parallel.pipeline.torch_schedule import Action, actions
from lockstep.strategy import AUTO, resolve, strategy_named

UNITS: Mapping[str, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}  # a backward pass costs as much as two forward
_COLUMNS = 240  # of text; a schedule that takes more of them is cut off


@dataclass(frozen=True)
class Timed:
    """An action with its time, in units of a stage's forward pass."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """A run of a schedule.

    Attributes:
        ranks: what each rank does, in order.
        end: when the last one is done.
    """

    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def end(self) -> float:
        return max(timed.end for rank in self.ranks for timed in rank)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait."""
        busy = sum(timed.end - timed.start for rank in self.ranks for timed in rank)
        return 1.0 - busy / (self.end * len(self.ranks))

    def kept(self) -> list[int]:
        """Of each rank, the largest number of activations (of one micro-batch on one stage) that it keeps at a time."""
        most = []
        for rank in self.ranks:
            now = top = 0
            for timed in rank:
                now += {"F": 1, "B": -1, "I": 0, "W": -1}[timed.action.kind]
                top = max(top, now)
            most.append(top)
        return most


def timeline(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int, costs: Mapping[str, float] = UNITS
) -> ScheduleTimeline:
    """The run of a schedule over `micro_batches`, padded where it takes no such number.

    Args:
        costs: of an action on one stage, by kind: F forward, B backward, I of inputs alone, W of weights alone.
    """
    count = facts_of(name, stages_per_rank).padded(micro_batches, ranks, ranks * stages_per_rank)
    lists = actions(name, ranks, stages_per_rank, count)
    return clocked(lists, ranks * stages_per_rank, lambda action: costs[action.kind])


def clocked(lists: Sequence[Sequence[Action]], stages: int, cost: Callable[[Action], float]) -> ScheduleTimeline:
    """Give each action its time.

    Args:
        lists: of each rank, what it computes, in order.
        cost: how long an action takes.
    """
    done: dict[Action, float] = {}
    places = [0] * len(lists)
    free = [0.0] * len(lists)
    ranks: list[list[Timed]] = [[] for _ in lists]
    while any(place < len(actions_) for place, actions_ in zip(places, lists, strict=True)):
        moved = False
        for rank, wanted in enumerate(lists):
            while places[rank] < len(wanted):
                action = wanted[places[rank]]
                ready = _ready(action, stages, done)
                if ready is None:
                    break
                start = max(free[rank], ready)
                free[rank] = done[action] = start + cost(action)
                ranks[rank].append(Timed(action, start, free[rank]))
                places[rank] += 1
                moved = True
        assert moved, "the schedule waits for itself"
    return ScheduleTimeline(tuple(map(tuple, ranks)))


def _ready(action: Action, stages: int, done: Mapping[Action, float]) -> float | None:
    """When what the action needs is there; None while that is not known."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind == "F":
        return 0.0 if stage == 0 else done.get(Action("F", stage - 1, micro_batch))
    if action.kind == "W":
        return done.get(Action("I", stage, micro_batch))
    if stage == stages - 1:
        return done.get(Action("F", stage, micro_batch))
    whole, half = Action("B", stage + 1, micro_batch), Action("I", stage + 1, micro_batch)
    return done.get(whole, done.get(half))


def picture_of(config: StepConfig, ranks: int | None = None) -> str:
    """The schedule that a config runs, as `picture` draws it: micro-batches of one run, on one of its pipelines.

    Args:
        ranks: in all; unset: as many as the config's sizes multiply to, or two.

    Raises:
        UsageError: the config is for another strategy, or its sizes, ranks and schedule do not agree.
    """
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
    """A schedule as text: a line a rank, time to the right, one column for as long as a forward pass takes."""
    run = timeline(schedule, ranks, stages_per_rank, micro_batches)
    facts = facts_of(schedule, stages_per_rank)
    count = facts.padded(micro_batches, ranks, ranks * stages_per_rank)
    laps = stages_per_rank > 1
    width = len(str(count - 1)) + 1 + laps
    left = len(f"rank {ranks - 1}  ")
    shown = min(int(run.end), (_COLUMNS - left) // (width + 1))
    lines = [_title(facts, ranks, stages_per_rank, micro_batches, count)]
    for rank, done in enumerate(run.ranks):
        cells = ["·".ljust(width)] * int(run.end)
        for timed in done:
            lap = chr(ord("a") + timed.action.stage // ranks) if laps else ""
            text = f"{timed.action.kind}{lap}{timed.action.micro_batch}".ljust(width)
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
    theory = _theory(facts, ranks, stages_per_rank, count)
    lines.append(f"bubble: ranks wait {run.bubble:.1%} of the time{theory}")
    lines.append(f"kept at most: {', '.join(map(str, run.kept()))} activations of a micro-batch, by rank")
    return "\n".join(lines)


def _title(facts: ScheduleFacts, ranks: int, stages_per_rank: int, micro_batches: int, count: int) -> str:
    kinds = "F forward, B backward, twice as long"
    if facts.splits_backward:
        kinds += "; I of inputs, W of weights, half a backward each"
    stages = f" × {stages_per_rank} stages" if stages_per_rank > 1 else ""
    extra = f", filled up to {count} with copies of no weight" if count > micro_batches else ""
    return f"{facts.name}, {ranks} ranks{stages}, {micro_batches} micro-batches{extra} ({kinds})"


def _theory(facts: ScheduleFacts, ranks: int, stages_per_rank: int, count: int) -> str:
    if facts.splits_backward:
        return ""
    laps = f"{stages_per_rank}·" if stages_per_rank > 1 else ""
    return f" = (p-1)/({laps}m+p-1) = {ranks - 1}/{stages_per_rank * count + ranks - 1}"
