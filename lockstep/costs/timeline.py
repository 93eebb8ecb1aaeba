"""A discrete-event simulation of a step: tasks on streams, each after others.

A stream (a GPU's computation, its communication, a link) runs its tasks in the order in which they were added, one at a
time; a task starts when its stream is free and all that it waits for is done. Nothing here knows torch.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Task(NamedTuple):
    """Seconds at which it begins and ends, since the first of all."""

    stream: Hashable
    begin: float
    end: float


@dataclass
class Timeline:
    """Tasks are added in an order in which each comes after those that it waits for."""

    tasks: list[Task] = field(default_factory=list)
    _free: dict[Hashable, float] = field(default_factory=dict)

    def add(self, stream: Hashable, seconds: float, after: Iterable[int] = ()) -> int:
        """Returns the task's number, for others to wait for."""
        begin = max([self._free.get(stream, 0.0), *(self.tasks[i].end for i in after)])
        self._free[stream] = begin + seconds
        self.tasks.append(Task(stream, begin, begin + seconds))
        return len(self.tasks) - 1

    @property
    def end(self) -> float:
        return max((task.end for task in self.tasks), default=0.0)

    def busy(self, stream: Hashable) -> float:
        return sum(task.end - task.begin for task in self.tasks if task.stream == stream)


class ScheduledPass(NamedTuple):
    """One of a pipeline rank's computations: F, B, I or W of a micro-batch on a stage."""

    kind: str
    stage: int
    micro_batch: int


def pipeline(
    orders: Sequence[Sequence[ScheduledPass]],
    seconds: dict[tuple[str, int], float],
    sends: Sequence[float],
    *,
    rank_of: Sequence[int],
) -> Timeline:
    """Run the schedules of all ranks of a pipeline.

    Args:
        orders: of each rank, its computations in order.
        seconds: (kind, stage) → how long it computes.
        sends: of each stage, how long its output, or the gradient of it, travels.
        rank_of: of each stage.
    """
    line = Timeline()
    done: dict[ScheduledPass, int] = {}
    places = [0] * len(orders)
    last = len(rank_of) - 1
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                step = order[places[rank]]
                needs = _needs(step, last)
                if any(need not in done for need in needs):
                    break
                task = line.add(("compute", rank), seconds[step.kind, step.stage], [done[n] for n in needs])
                done[step] = task
                to = _goes_to(step, last)
                if to is not None:
                    arrival = task
                    if rank_of[to] != rank:
                        arrival = line.add((rank, rank_of[to]), sends[min(step.stage, to)], [task])
                    done[ScheduledPass("arrived F" if step.kind == "F" else "arrived B", to, step.micro_batch)] = (
                        arrival
                    )
                places[rank] += 1
                left -= 1
        assert left < before, "the schedules wait for each other"
    return line


def _needs(step: ScheduledPass, last: int) -> list[ScheduledPass]:
    kind, stage, micro_batch = step
    if kind == "F":
        return [ScheduledPass("arrived F", stage, micro_batch)] if stage else []
    if kind == "W":
        return [ScheduledPass("I", stage, micro_batch)]
    needs = [ScheduledPass("F", stage, micro_batch)]
    if stage < last:
        needs.append(ScheduledPass("arrived B", stage, micro_batch))
    return needs


def _goes_to(step: ScheduledPass, last: int) -> int | None:
    if step.kind == "F":
        return step.stage + 1 if step.stage < last else None
    if step.kind in ("B", "I"):
        return step.stage - 1 if step.stage else None
    return None
