"""How long a step takes, what it sends over which link, and how much of that nothing hides."""

from dataclasses import dataclass

from lockstep.costs.hardware import GpuCluster
from lockstep.costs.network import Group, group_of
from lockstep.costs.timeline import Timeline
from lockstep.layout import Layout


@dataclass(frozen=True)
class ModelSize:
    """What is to be known of a model whatever its layout.

    Attributes:
        parameters: how many.
        blocks, segments: how many; 0 where it names none.
        units: what FSDP gathers one by one, and
        unit_parameters: of the average one.
        optimizer_bytes: of state a parameter, at least.
        low_rank_bytes: of the gradients as PowerSGD would send them, at the rank that the config says.
    """

    parameters: int
    blocks: int
    segments: int
    units: int
    unit_parameters: float
    optimizer_bytes: float
    low_rank_bytes: float


@dataclass(frozen=True)
class Pieces:
    """A model as steps are made of: equal units, and what belongs to none.

    Attributes:
        units: how many are gathered or reduced one by one.
        unit_bytes, rest_bytes: fp32 bytes of the parameters of one, and of the rest.
        forward, backward: seconds of one micro-batch, over all units and the rest.
        update: seconds of the optimizer, for this rank's share.
        low_rank_bytes: of the gradients as PowerSGD sends them, where it does.
    """

    units: int
    unit_bytes: float
    rest_bytes: float
    forward: float
    backward: float
    update: float = 0.0
    low_rank_bytes: float = 0.0

    @property
    def parameter_bytes(self) -> float:
        return self.units * self.unit_bytes + self.rest_bytes


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step.

    Attributes:
        compute: in which this rank computes.
        exposed: in which it waits for communication.
        bubble: in which it waits for other pipeline ranks.
        inside, between: bytes that this rank sends over links inside of its node, and between nodes.
    """

    seconds: float
    compute: float
    exposed: float
    bubble: float = 0.0
    inside: float = 0.0
    between: float = 0.0


def replicated_step(
    pieces: Pieces, layout: Layout, cluster: GpuCluster, micro_batches: int, *, sent: float, bucket_bytes: float
) -> StepTime:
    """Return the time of a step of replicas that all-reduce their gradients, in buckets, while backward runs.

    Args:
        sent: bytes of all gradients on the link.
        bucket_bytes: of fp32 gradients in a bucket.
    """
    line, group = Timeline(), group_of(cluster, layout.world_size)
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
    inside, between = (2 * b for b in group.bytes_sent(sent))
    return _summed(line, inside, between)


def rarely_exchanged_step(
    pieces: Pieces, layout: Layout, cluster: GpuCluster, micro_batches: int, *, sent: float
) -> StepTime:
    """Return the mean time of a step of local updates: of a round of steps one exchanges, or several in fragments.

    Args:
        sent: bytes on the link, on average of a step.
    """
    line, group = Timeline(), group_of(cluster, layout.world_size)
    line.add("compute", micro_batches * (pieces.forward + pieces.backward) + pieces.update + agreements(group) / 2)
    line.add("links", group.all_reduce(sent), [0])
    inside, between = (2 * b for b in group.bytes_sent(sent))
    return _summed(line, inside, between)


def sharded_step(
    pieces: Pieces, layout: Layout, cluster: GpuCluster, micro_batches: int, *, gathers_again: bool, width: float,
    reduces_each: bool,
) -> StepTime:  # fmt: skip
    """Return the time of a step of shards: units are gathered before they compute, gradients reduce-scattered after.

    Args:
        gathers_again: units are freed after their forward pass, and gathered again for backward.
        width: bytes of gathered parameters, against fp32.
        reduces_each: gradients of each micro-batch are reduced, else those of the last.
    """
    line = Timeline()
    shards, replicas = group_of(cluster, layout.shard), group_of(cluster, layout.replicate, layout.shard)
    again = gathers_again
    sizes = [pieces.rest_bytes, *[pieces.unit_bytes] * pieces.units] if pieces.units else [pieces.rest_bytes]
    shares = len(sizes) - 1 or 1
    inside = between = 0.0
    for micro_batch in range(micro_batches):
        last = micro_batch == micro_batches - 1
        reduces = reduces_each or last
        gathered = [line.add("links", shards.gather(sizes[0] * width))]
        for size in sizes[1:]:
            gathered.append(line.add("links", shards.gather(size * width)))
            line.add("compute", pieces.forward / shares, gathered)
        if len(sizes) == 1:
            line.add("compute", pieces.forward, gathered)
        units = list(reversed(sizes[1:] or sizes))
        asked = [line.add("links", shards.gather(size * width)) for size in units[:1] if again]
        for place, size in enumerate(units):
            here = asked
            if again:  # the next unit is asked for before this one computes
                asked = [line.add("links", shards.gather(more * width)) for more in units[place + 1 : place + 2]]
            done = line.add("compute", pieces.backward / shares, here)
            if reduces:
                _reduce(line, shards, replicas, size, last, done)
        if reduces and len(sizes) > 1:
            _reduce(line, shards, replicas, sizes[0], last, len(line.tasks) - 1)
        gathers = (2 if again else 1) * pieces.parameter_bytes * width + (pieces.parameter_bytes if reduces else 0.0)
        a, b = shards.bytes_sent(gathers)
        c, d = replicas.bytes_sent(2 * pieces.parameter_bytes / layout.shard if last else 0.0)
        inside, between = inside + a + c, between + b + d
    line.add("compute", pieces.update + agreements(shards) + agreements(replicas), range(len(line.tasks)))
    computed = micro_batches * (pieces.forward + pieces.backward) + pieces.update
    return StepTime(line.end, computed, line.end - computed, 0.0, inside, between)


def agreements(group: Group) -> float:
    """Seconds of a step's small collectives: losses and counts, and the norm."""
    return 2 * group.all_reduce(64.0)


def _reduce(
    line: Timeline, shards: Group, replicas: Group, size: float, last: bool, after: int
) -> None:  # fmt: skip
    line.add("links", shards.gather(size), [after])
    if last and replicas.size > 1:
        line.add("links", replicas.all_reduce(size / shards.size))


def _summed(line: Timeline, inside: float, between: float) -> StepTime:
    computed = line.busy("compute")
    return StepTime(line.end, computed, line.end - computed, 0.0, inside, between)
