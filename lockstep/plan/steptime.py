"""How long a step takes, what it sends over which link, and how much of that nothing hides."""

from dataclasses import dataclass

from lockstep.config import Config
from lockstep.layout import Layout
from lockstep.parallel.wire import bytes_each
from lockstep.plan.hardware import Cluster
from lockstep.plan.network import Group, group_of, send
from lockstep.plan.timeline import Step, Timeline, pipeline

BUCKET = 2**20  # bucket_cap_mb is in MiB


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


def data_parallel_step(
    pieces: Pieces, config: Config, layout: Layout, cluster: Cluster, micro_batches: int
) -> StepTime:
    """A step of single, ddp, fsdp or diloco: `micro_batches` on each rank."""
    if layout.strategy == "diloco":
        return _diloco(pieces, config, layout, cluster, micro_batches)
    if layout.strategy == "fsdp" and layout.world_size > 1:
        return _fsdp(pieces, config, layout, cluster, micro_batches)
    return _ddp(pieces, config, layout, cluster, micro_batches)


def _ddp(pieces: Pieces, config: Config, layout: Layout, cluster: Cluster, micro_batches: int) -> StepTime:
    line, group = Timeline(), group_of(cluster, layout.world_size)
    for _ in range(micro_batches - 1):
        line.add("compute", pieces.forward + pieces.backward)
    line.add("compute", pieces.forward)
    whole = pieces.parameter_bytes
    cap = config.distributed.ddp.bucket_cap_mb * BUCKET
    count = max(1, round(whole / cap)) if whole > cap else 1
    on_the_wire = {
        "none": whole, "auto": whole, "fp16": whole / 2, "bf16": whole / 2, "powersgd": pieces.low_rank_bytes,
    }[config.distributed.ddp.compression.kind]  # fmt: skip
    reduced = []
    for _ in range(count):
        ready = line.add("compute", pieces.backward / count)
        if group.size > 1:
            reduced.append(line.add("links", group.all_reduce(on_the_wire / count), [ready]))
    line.add("compute", pieces.update + _agreements(group), reduced)
    inside, between = (2 * b for b in group.bytes_sent(on_the_wire))
    return _summed(line, inside, between)


def _diloco(pieces: Pieces, config: Config, layout: Layout, cluster: Cluster, micro_batches: int) -> StepTime:
    """The mean over a round: of its steps one exchanges, or several that exchange fragments."""
    line, group = Timeline(), group_of(cluster, layout.world_size)
    options = config.distributed.diloco
    sent = pieces.parameter_bytes / 4 * bytes_each(options.send_as) / options.inner_steps
    line.add("compute", micro_batches * (pieces.forward + pieces.backward) + pieces.update + _agreements(group) / 2)
    line.add("links", group.all_reduce(sent), [0])
    inside, between = (2 * b for b in group.bytes_sent(sent))
    return _summed(line, inside, between)


def _fsdp(pieces: Pieces, config: Config, layout: Layout, cluster: Cluster, micro_batches: int) -> StepTime:
    line = Timeline()
    shards, replicas = group_of(cluster, layout.shard), group_of(cluster, layout.replicate, layout.shard)
    kind = config.distributed.fsdp
    again = kind.sharding_strategy in ("full_shard", "hybrid_shard")
    width = 0.5 if config.precision.param_dtype == "bf16" else 1.0  # of gathered parameters, against fp32
    sizes = [pieces.rest_bytes, *[pieces.unit_bytes] * pieces.units] if pieces.units else [pieces.rest_bytes]
    shares = len(sizes) - 1 or 1
    inside = between = 0.0
    for micro_batch in range(micro_batches):
        last = micro_batch == micro_batches - 1
        reduces = kind.accumulate == "sharded" or last
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
    line.add("compute", pieces.update + _agreements(shards) + _agreements(replicas), range(len(line.tasks)))
    computed = micro_batches * (pieces.forward + pieces.backward) + pieces.update
    return StepTime(line.end, computed, line.end - computed, 0.0, inside, between)


def _agreements(group: Group) -> float:
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


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch on one stage, bytes that it sends on, and fp32 bytes of its parameters."""

    forward: float
    backward: float
    sent: float
    parameter_bytes: float


def pipeline_step(
    stages: list[StageTime], config: Config, layout: Layout, cluster: Cluster, micro_batches: int, update: float = 0.0
) -> StepTime:
    """A step of a pipeline, the stages of which are replicated or sharded over `layout.data_parallel_size` ranks."""
    # torch's pipelining loads its compiler, and `strategy: auto` is at every start.
    from lockstep.parallel.pipeline.partition import rank_of
    from lockstep.parallel.pipeline.schedules import facts_of
    from lockstep.parallel.pipeline.torch_schedule import actions

    options = config.distributed.pipeline
    facts = facts_of(options.schedule, options.stages_per_rank)
    count = facts.padded(micro_batches, layout.pipeline, len(stages))
    orders = [
        [Step(a.kind, a.stage, a.micro_batch) for a in order]
        for order in actions(options.schedule, layout.pipeline, options.stages_per_rank, count)
    ]
    seconds: dict[tuple[str, int], float] = {}
    for index, stage in enumerate(stages):
        halves = stage.backward / 2
        seconds |= {
            ("F", index): stage.forward,
            ("B", index): stage.backward,
            ("I", index): halves,
            ("W", index): halves,
        }
    stride = layout.data_parallel_size
    sends = [send(cluster, stage.sent, stride) for stage in stages]
    holders = [rank_of(index, layout.pipeline, v_shaped=facts.v_shaped) for index in range(len(stages))]
    line = pipeline(orders, seconds, sends, rank_of=holders)
    group = group_of(cluster, stride)
    heaviest = max(
        sum(s.parameter_bytes for s, r in zip(stages, holders, strict=True) if r == k) for k in range(layout.pipeline)
    )
    # Shards gather once and reduce once a step (FSDP2 holds a stage's gradients until then); replicas all-reduce.
    around = group.all_reduce(heaviest)
    busiest = max(line.busy(("compute", rank)) for rank in range(layout.pipeline))
    end = line.end + around + update + _agreements(group_of(cluster, layout.world_size))
    a, b = group.bytes_sent(2 * heaviest)
    sent = 2 * micro_batches * max(s.sent for s in stages[:-1])
    near = stride < cluster.per_node
    return StepTime(
        end, busiest + update, around, line.end - busiest, a + (sent if near else 0.0), b + (0.0 if near else sent)
    )
