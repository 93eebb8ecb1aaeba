"""The time of a pipeline's step: torch's order of actions, timed stage by stage."""

from dataclasses import dataclass

from lockstep.config import StepConfig
from lockstep.costs.hardware import GpuCluster, group_of, send
from lockstep.costs.steps import StepTime, agreements, pipeline
from lockstep.layout import Layout
from lockstep.parallel.pipeline.schedules import facts_of, rank_of
from lockstep.parallel.pipeline.torch_schedule import actions


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch on one stage, bytes that it sends on, and fp32 bytes of its parameters."""

    forward: float
    backward: float
    sent: float
    parameter_bytes: float


def pipeline_step(
    stages: list[StageTime],
    config: StepConfig,
    layout: Layout,
    cluster: GpuCluster,
    micro_batches: int,
    update: float = 0.0,
) -> StepTime:
    """Return the time of a pipeline's step, with stages replicated or sharded over the data-parallel ranks."""
    options = config.distributed.pipeline
    facts = facts_of(options.schedule, options.stages_per_rank)
    count = facts.padded(micro_batches, layout.pipeline, len(stages))
    orders = actions(options.schedule, layout.pipeline, options.stages_per_rank, count)
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
    end = line.end + around + update + agreements(group_of(cluster, layout.world_size))
    a, b = group.bytes_sent(2 * heaviest)
    sent = 2 * micro_batches * max(s.sent for s in stages[:-1])
    near = stride < cluster.per_node
    return StepTime(
        end, busiest + update, around, line.end - busiest, a + (sent if near else 0.0), b + (0.0 if near else sent)
    )
