"""Simulates a step: its time, its traffic per link, and how much communication is not hidden.

A stream (a GPU's computation, its communication, a link) runs its tasks one at a time, in the order
in which they were added; a task starts when its stream is free and all tasks that it waits for are
done.

Tests: tests/plan/test_resources.py, tests/plan/test_stages.py, tests/plan/test_published.py
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from lockstep.costs.hardware import GpuCluster, Group, group_of
from lockstep.layout import Layout


class Task(NamedTuple):
    """A task of a stream; its seconds count from the first task's begin."""

    stream: Hashable
    begin: float
    end: float


@dataclass
class Timeline:
    """The tasks of all streams, each added after those that it waits for."""

    tasks: list[Task] = field(default_factory=list)
    _free: dict[Hashable, float] = field(default_factory=dict)

    def add(self, stream: Hashable, seconds: float, after: Iterable[int] = ()) -> int:
        """Add a task; return its number, for others to wait for."""
        begin = max([self._free.get(stream, 0.0), *(self.tasks[i].end for i in after)])
        self._free[stream] = begin + seconds
        self.tasks.append(Task(stream, begin, begin + seconds))
        return len(self.tasks) - 1

    @property
    def end(self) -> float:
        """Seconds until the last task ends."""
        return max((task.end for task in self.tasks), default=0.0)

    def busy(self, stream: Hashable) -> float:
        """Return the seconds in which a stream runs tasks."""
        return sum(task.end - task.begin for task in self.tasks if task.stream == stream)


class ScheduledPass(NamedTuple):
    """One computation of a pipeline rank: F, B, I or W of a micro-batch on a stage."""

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
        orders: each rank's computations in order.
        seconds: (kind, stage) → seconds of the computation.
        sends: seconds that each stage's output, or its gradient, takes to the next stage.
    """
    line = Timeline()
    done: dict[ScheduledPass, int] = {}  # a pass, or a message that is there → its task
    last = len(rank_of) - 1

    def run(rank: int, step: ScheduledPass) -> None:
        """Run a pass, and send what it makes to the neighbouring stage."""
        after = [done[need] for need in _needs(step, last)]
        done[step] = line.add(("compute", rank), seconds[step.kind, step.stage], after)
        to = step.stage + (1 if step.kind == "F" else -1)
        if step.kind == "W" or not 0 <= to <= last:
            return
        arrival = done[step]
        if rank_of[to] != rank:
            arrival = line.add((rank, rank_of[to]), sends[min(step.stage, to)], [arrival])
        kind = "arrived F" if step.kind == "F" else "arrived B"
        done[ScheduledPass(kind, to, step.micro_batch)] = arrival

    waiting = [deque(order) for order in orders]
    while any(waiting):
        before = len(done)
        for rank, order in enumerate(waiting):
            while order and all(need in done for need in _needs(order[0], last)):
                run(rank, order.popleft())
        assert len(done) > before, "the schedules wait for each other"
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


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that do not depend on its layout."""

    parameters: int  # number of parameters
    blocks: int  # blocks, segments: number of each; 0 if the model names none
    segments: int
    # units, unit_parameters: number of units that FSDP gathers one by one, and the average
    # parameters of one
    units: int
    unit_parameters: float
    optimizer_bytes: float  # optimizer state per parameter, at least
    low_rank_bytes: float  # size of the gradients under PowerSGD, at the config's rank
    # of the parameters, those of the experts in mixture layers, which are among the units
    expert_parameters: int = 0


@dataclass(frozen=True)
class Pieces:
    """A model's step as equal units and a rest."""

    units: int  # number of units that are gathered or reduced one by one
    # unit_bytes, rest_bytes: fp32 bytes of the parameters of one unit, and of the rest
    unit_bytes: float
    rest_bytes: float
    forward: float  # forward, backward: seconds of one micro-batch, over all units and the rest
    backward: float
    update: float = 0.0  # seconds of the optimizer, for this rank's share
    low_rank_bytes: float = 0.0  # size of the gradients under PowerSGD, if it is used
    # The strategy's own axes tell what they send: see `Axis.message_cost`.
    are_sent: bool = False

    @property
    def parameter_bytes(self) -> float:
        """Fp32 bytes of all parameters."""
        return self.units * self.unit_bytes + self.rest_bytes


@dataclass(frozen=True)
class StepTime:
    """Time of a step, in seconds, and its traffic."""

    seconds: float
    compute: float  # time in which this rank computes
    exposed: float  # time in which it waits for communication
    bubble: float = 0.0  # time in which it waits for other pipeline ranks
    # inside, between: bytes that this rank sends over links inside of its node, and between nodes
    inside: float = 0.0
    between: float = 0.0


class Sent(NamedTuple):
    """The messages of a step that nothing hides.

    There are seconds, and bytes inside of a node and between nodes.
    """

    seconds: float = 0.0
    inside: float = 0.0
    between: float = 0.0

    def plus(self, other: "Sent", times: float = 1) -> "Sent":
        """Return the sum with `times` times another one."""
        return Sent(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


def parts_sent(axis: str, size: float, layout: Layout, cluster: GpuCluster) -> Sent:
    """Return what a rank sends, and waits for, as `size` bytes of its parts go to all others.

    `axis` is one whose ranks run the same micro-batches. Latency is left out.
    """
    of_axis = {name: (ranks, stride) for name, ranks, stride in layout.strides()}
    ranks, stride = of_axis[axis]
    if ranks == 1:
        return Sent()
    group = group_of(cluster, ranks, stride)
    gathered = size * ranks / (ranks - 1)
    return Sent(group.moved(gathered), *group.bytes_sent(gathered))


def all_reduced(size: float, layout: Layout, cluster: GpuCluster) -> Sent:
    """Return what a rank sends in an all-reduce of `size` bytes, and waits for.

    It is among the ranks that share out a step's micro-batches.
    """
    group = group_of(cluster, layout.data_parallel_size, layout.same_batch_size)
    return Sent(group.all_reduce(size), *group.bytes_sent(2 * size))


def with_sent(step: StepTime, waited: Sent, after: Sent) -> StepTime:
    """Return a step's time with the messages that it waits for.

    `waited` counted as computation so far, and `after` not at all.
    """
    return replace(
        step,
        seconds=step.seconds + after.seconds,
        compute=step.compute - waited.seconds,
        exposed=step.exposed + waited.seconds + after.seconds,
        inside=step.inside + waited.inside + after.inside,
        between=step.between + waited.between + after.between,
    )


def replicated_step(
    pieces: Pieces,
    layout: Layout,
    cluster: GpuCluster,
    micro_batches: int,
    *,
    sent: float,
    bucket_bytes: float,
) -> StepTime:
    """Return the time of a step of replicas.

    They all-reduce their gradients in buckets, during the backward pass.

    Args:
        sent: bytes of all gradients on the link.
        bucket_bytes: fp32 gradients per bucket.
    """
    line = Timeline()
    group = group_of(cluster, layout.world_size)
    for _ in range(micro_batches - 1):
        line.add("compute", pieces.forward + pieces.backward)
    line.add("compute", pieces.forward)
    whole = pieces.parameter_bytes
    count = max(1, round(whole / bucket_bytes)) if whole > bucket_bytes else 1
    reduced = []
    for _ in range(count):
        ready = line.add("compute", pieces.backward / count)
        if group.size > 1:
            reduced.append(line.add("links", group.all_reduce(sent / count), [ready]))
    line.add("compute", pieces.update + agreements(group), reduced)
    return _summed(line, group, sent)


def rarely_exchanged_step(
    pieces: Pieces, layout: Layout, cluster: GpuCluster, micro_batches: int, *, sent: float
) -> StepTime:
    """Return the mean time of a step of local updates, some of which exchange.

    `sent`: mean bytes on the link.
    """
    line = Timeline()
    group = group_of(cluster, layout.world_size)
    line.add(
        "compute",
        micro_batches * (pieces.forward + pieces.backward) + pieces.update + agreements(group) / 2,
    )
    line.add("links", group.all_reduce(sent), [0])
    return _summed(line, group, sent)


def sharded_step(
    pieces: Pieces,
    layout: Layout,
    cluster: GpuCluster,
    micro_batches: int,
    *,
    gathers_again: bool,
    width: float,
    reduces_each: bool,
) -> StepTime:
    """Return the time of a sharded step.

    Units are gathered before they compute, and gradients are reduce-scattered after.

    Args:
        gathers_again: whether units are freed after their forward pass, and gathered again for
            backward.
        width: bytes of gathered parameters, relative to fp32.
        reduces_each: whether gradients of each micro-batch are reduced, not only the last.
    """
    line = Timeline()
    shards = group_of(cluster, layout.shard)
    replicas = group_of(cluster, layout.replicate, layout.shard)
    rest = pieces.rest_bytes
    units = [pieces.unit_bytes] * pieces.units
    shares = len(units) or 1  # in as many tasks a pass computes
    whole = pieces.parameter_bytes
    inside = between = 0.0
    for micro_batch in range(micro_batches):
        last = micro_batch == micro_batches - 1
        reduces = reduces_each or last

        # Forward: a unit computes once it and those before it are gathered.
        gathered = [line.add("links", shards.gather(rest * width))]
        for size in units:
            gathered.append(line.add("links", shards.gather(size * width)))
            line.add("compute", pieces.forward / shares, gathered)
        if not units:
            line.add("compute", pieces.forward, gathered)

        # Backward: the last unit first.
        computed = units[::-1] or [rest]
        prefetched = [
            line.add("links", shards.gather(size * width)) for size in computed[:1] if gathers_again
        ]
        for index, size in enumerate(computed):
            here = prefetched
            if gathers_again:  # prefetch: the next unit is gathered before this one computes
                prefetched = [
                    line.add("links", shards.gather(following * width))
                    for following in computed[index + 1 : index + 2]
                ]
            done = line.add("compute", pieces.backward / shares, here)
            if reduces:
                _reduce(line, shards, replicas, size, last, done)
        if reduces and units:
            _reduce(line, shards, replicas, rest, last, len(line.tasks) - 1)

        gathers = (2 if gathers_again else 1) * whole * width + (whole if reduces else 0.0)
        for group, sent in (
            (shards, gathers),
            (replicas, 2 * whole / layout.shard if last else 0.0),
        ):
            inside_node, between_nodes = group.bytes_sent(sent)
            inside += inside_node
            between += between_nodes
    line.add(
        "compute", pieces.update + agreements(shards) + agreements(replicas), range(len(line.tasks))
    )
    seconds = micro_batches * (pieces.forward + pieces.backward) + pieces.update
    return StepTime(line.end, seconds, line.end - seconds, 0.0, inside, between)


def agreements(group: Group) -> float:
    """Return the seconds of a step's small collectives: losses and counts, and the norm."""
    return 2 * group.all_reduce(64.0)


def _reduce(
    line: Timeline, shards: Group, replicas: Group, size: float, last: bool, after: int
) -> None:
    line.add("links", shards.gather(size), [after])
    if last and replicas.size > 1:
        line.add("links", replicas.all_reduce(size / shards.size))


def _summed(line: Timeline, group: Group, sent: float) -> StepTime:
    computed = line.busy("compute")
    inside, between = group.bytes_sent(sent)
    return StepTime(line.end, computed, line.end - computed, 0.0, 2 * inside, 2 * between)
