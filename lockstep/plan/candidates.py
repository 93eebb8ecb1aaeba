"""Which layouts there are for a model on a cluster, what each needs and how fast it is, and which is best."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lockstep.config import Config, require_equation
from lockstep.costs.hardware import Cost, GpuCluster
from lockstep.costs.steps import ModelSize, Pieces, StepTime
from lockstep.errors import UsageError
from lockstep.layout import AXES, Layout
from lockstep.plan.compressing import advice
from lockstep.plan.facts import facts_of
from lockstep.plan.rehearsal import Rehearsal, rehearse
from lockstep.plan.resources import GIB
from lockstep.plan.workload import Workload
from lockstep.progress import Advance, progress_of
from lockstep.strategy import known_strategies, resolve, strategy_named

LARGE = 5e9  # parameters


@dataclass
class Candidate:
    """One layout.

    Attributes:
        changes: keys of the config that make it, dotted.
        memory: peak bytes on the fullest rank, by part; None where the model's state alone is too much.
        least: bytes that it needs at least.
        step: None where it does not fit by far.
        samples: of a step, over all ranks.
        model_flops: of a step, over all ranks, recomputation not counted.
        refused: why it can't be had at all.
    """

    layout: Layout
    changes: dict[str, Any]
    memory: dict[str, int] | None = None
    least: float = 0.0
    step: StepTime | None = None
    samples: int = 0
    model_flops: float = 0.0
    refused: str = ""
    limit: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def needed(self) -> float:
        return sum(self.memory.values()) if self.memory is not None else self.least

    @property
    def fits(self) -> bool:
        return not self.refused and self.memory is not None and self.needed <= self.limit

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.step.seconds if self.step is not None else 0.0

    @property
    def checkpointing(self) -> str:
        return str(self.changes.get("training.gradient_checkpointing", ""))

    def name(self) -> str:
        schedule = self.changes.get("distributed.pipeline.schedule", "")
        kind = "" if schedule else self.changes.get("distributed.fsdp.sharding_strategy", "")
        more = [word for word in (kind, schedule) if word]
        if self.checkpointing not in ("", "none"):
            more.append(f"checkpointing {self.checkpointing}")
        if self.changes.get("precision.param_dtype") == "bf16":
            more.append("bf16 weights")
        if self.changes.get("distributed.fsdp.cpu_offload"):
            more.append("offload")
        return " ".join([str(self.layout), *more])


def candidates(
    work: Workload, config: Config, cluster: GpuCluster, *, low: bool = True, pipelines: bool = True, says: bool = True,
    first: Callable[[Candidate], None] = lambda _candidate: None,
) -> list[Candidate]:  # fmt: skip
    """Judge all layouts that are worth a look, and return them, the best first.

    Args:
        low: weights in bf16, too, which changes results.
        pipelines: pipelines, too.
        says: how far it is, where it takes long.
        first: called with the first layout whose memory is known, long before all are.
    """
    facts = facts_of(work, config)
    layouts, modes = list(_layouts(facts, config, cluster, low, pipelines)), _modes(facts, config)
    found: list[Candidate] = []
    with progress_of("planning", len(layouts) * len(modes), unit="layouts", shows=says) as advance:
        for layout in layouts:
            known = any(candidate.memory is not None for candidate in found)
            found += _over_modes(work, config, cluster, facts, layout, modes, advance, first if not known else None)
    if not any(candidate.fits for candidate in found) and cluster.num_gpus > 1:
        offloaded = [strategy.layout_with_offload() for strategy in known_strategies(config.distributed.strategy)]
        for layout in filter(None, offloaded if facts.blocks else []):
            found.append(judge(work, config, cluster, layout | {"training.gradient_checkpointing": "full"}, facts))
    return sorted(found, key=lambda c: (not c.fits, -c.samples_per_second if c.fits else c.needed))


def _over_modes(
    work: Workload, config: Config, cluster: GpuCluster, facts: ModelSize, layout: dict[str, Any], modes: list[str],
    advance: Advance, first: Callable[[Candidate], None] | None = None,
) -> list[Candidate]:  # fmt: skip
    """Judge one layout with each mode of checkpointing, the one that needs least memory first."""
    found: list[Candidate] = []
    most = None
    for mode in modes:
        changes = {**layout, "training.gradient_checkpointing": mode}
        if most is not None and not most.fits:  # without recomputation it takes more still
            found.append(Candidate(most.layout, changes, least=most.needed, limit=most.limit, samples=most.samples))
        else:
            judged = judge(work, config, cluster, changes, facts)
            if most is None and first is not None and judged.memory is not None:
                first(judged)
            most = most or judged
            if not judged.refused:
                found.append(judged)
        advance(1)
    return found


def _modes(facts: ModelSize, config: Config) -> list[str]:
    """Of checkpointing, the one that needs least memory first."""
    if not facts.blocks:
        return ["none"]
    asked = config.training.gradient_checkpointing
    return ["full", *([asked] if asked not in ("full", "none") else []), "none"]


def _layouts(
    facts: ModelSize, config: Config, cluster: GpuCluster, may_be_low: bool, pipelines: bool
) -> Iterator[dict[str, Any]]:  # fmt: skip
    low = {"precision.param_dtype": "bf16"}
    may_be_low &= cluster.gpu.has_bf16 and config.precision.mode == "bf16" and not config.distributed.reproducible
    # Autocast keeps copies of fp32 weights; where these are many, weights gathered in bf16 are the only way.
    widths = [low] if may_be_low and facts.parameters > LARGE else [{}, low] if may_be_low else [{}]
    for strategy in known_strategies(config.distributed.strategy):
        if strategy.splits_model and not pipelines:
            continue
        for layout in strategy.layouts_to_plan(facts, config.step, cluster):
            if not strategy.cuts_parameters(_layout(config, cluster, layout)):
                yield layout
            for width in widths[-1:] if strategy.splits_model else widths:
                if strategy.cuts_parameters(_layout(config, cluster, layout)):
                    yield layout | width


def _layout(config: Config, cluster: GpuCluster, changes: dict[str, Any]) -> Layout:
    return resolve(config.replaced(_NO_SIZES | changes).distributed, cluster.num_gpus, cluster.per_node)


_NO_SIZES = {f"distributed.{axis}_size": None for axis in AXES}


def judge(work: Workload, config: Config, cluster: GpuCluster, changes: dict[str, Any], facts: ModelSize) -> Candidate:
    """Memory and time of one layout."""
    config = config.replaced(_NO_SIZES | changes)
    strategy = strategy_named(config.distributed.strategy)
    layout = resolve(config.distributed, cluster.num_gpus, cluster.per_node)
    candidate = Candidate(layout, changes, limit=cluster.usable_memory)
    try:
        count = micro_batches(config, layout)
    except UsageError as error:
        candidate.refused = error.what
        return candidate
    shards = layout.shard * layout.pipeline
    offload = config.distributed.fsdp.cpu_offload
    state = 0.0 if offload else facts.parameters * (4 + facts.optimizer_bytes) / shards
    whole = 8 * facts.parameters / layout.pipeline if strategy.splits_model and layout.shard > 1 else 0.0
    candidate.least = state + whole
    candidate.samples = config.training.batch_size * count * layout.data_parallel_size
    if candidate.least > candidate.limit:
        return candidate
    try:
        if strategy.splits_model:
            _judge_pipeline(candidate, work, config, cluster, count, facts)
        else:
            _judge_data_parallel(candidate, work, config, cluster, count, facts)
    except UsageError as error:
        candidate.refused = error.what
    return candidate


def micro_batches(config: Config, layout: Layout) -> int:
    """Of a rank in a step.

    Raises:
        UsageError: the global batch can't be shared out.
    """
    training = config.training
    if training.global_batch_size is None:
        return training.accumulation
    require_equation(training, layout.batch_shares)
    count, rest = divmod(training.global_batch_size, training.batch_size)
    if rest:
        raise UsageError(
            f"global_batch_size {training.global_batch_size} is not a multiple of {training.batch_size}",
            fix="choose a batch_size that divides it",
        )
    return -(-count // layout.data_parallel_size)


def pieces_of(facts: ModelSize, rehearsal: Rehearsal, seconds: Callable[[Cost], float]) -> Pieces:
    """What a step is made of; `seconds`: how long a GPU takes for a cost."""
    computed = rehearsal.work
    return Pieces(
        facts.units, 4 * facts.unit_parameters, 4 * (facts.parameters - facts.units * facts.unit_parameters),
        seconds(computed.forward), seconds(computed.backward), seconds(computed.update), facts.low_rank_bytes,
    )  # fmt: skip


def _judge_data_parallel(
    candidate: Candidate, work: Workload, config: Config, cluster: GpuCluster, count: int, facts: ModelSize
) -> None:
    layout = candidate.layout
    rehearsal = rehearse(work, config, layout, micro_batches=count, device_type=_device_type(cluster))
    memory = dict(rehearsal.peak.parts)
    if config.distributed.fsdp.cpu_offload:
        moved = [memory.pop(kind) for kind in ("parameters", "optimizer", "gradients")]
        candidate.notes.append(f"{sum(moved) / GIB:.1f} GiB a rank in host memory")
    strategy = strategy_named(layout.strategy)
    memory["parameters"] += round(strategy.further_state(config.step, facts.parameters))
    candidate.memory = memory
    pieces = pieces_of(facts, rehearsal, cluster.seconds)
    candidate.step = strategy.step_time(pieces, config.step, layout, cluster, count)
    candidate.notes += advice(pieces, config, layout, cluster, count)
    candidate.model_flops = 3.0 * rehearsal.work.forward.flops * count * layout.data_parallel_size


def _device_type(cluster: GpuCluster) -> str:
    return "cpu" if cluster.gpu.name == "CPU" else "cuda"


def _judge_pipeline(
    candidate: Candidate, work: Workload, config: Config, cluster: GpuCluster, count: int, facts: ModelSize
) -> None:
    from lockstep.parallel.pipeline.cost import StageTime, pipeline_step
    from lockstep.plan.stages import rehearse_rank  # loads torch's compiler

    layout = candidate.layout
    looked_at = sorted({0, layout.pipeline // 2, layout.pipeline - 1})
    found = {
        rank: rehearse_rank(work, config, layout, rank, micro_batches=count, device_type=_device_type(cluster))
        for rank in looked_at
    }
    fullest = max(found.values(), key=lambda rehearsal: rehearsal.peak.total)
    candidate.memory = dict(fullest.peak.parts)
    stages: list[StageTime] = []
    flops = 0
    per_rank = config.distributed.pipeline.stages_per_rank
    for stage in range(layout.pipeline * per_rank):
        holder = next((r for r in found.values() if stage in r.stages), None)
        middle = found[layout.pipeline // 2].stages
        computed = holder.stages[stage] if holder is not None else next(iter(middle.values()))
        flops += computed.forward.flops
        stages.append(
            StageTime(
                cluster.seconds(computed.forward), cluster.seconds(computed.backward), float(fullest.sent[stage]),
                4 * facts.parameters / (layout.pipeline * per_rank),
            )
        )  # fmt: skip
    update = max(cluster.seconds(rehearsal.work.update) for rehearsal in found.values())
    candidate.step = pipeline_step(stages, config.step, layout, cluster, count, update)
    candidate.model_flops = 3.0 * flops * count * layout.data_parallel_size


_MOST_TRIES = 10


def largest_batch(work: Workload, config: Config, cluster: GpuCluster, changes: dict[str, Any]) -> int:
    """The largest `training.batch_size` that fits under one layout; 0 where even 1 does not."""
    facts, limit = facts_of(work, config), cluster.usable_memory
    with progress_of("finding the largest batch", _MOST_TRIES, unit="tries at most") as advance:

        def needs(size: int) -> float:
            sized = {**changes, "training.batch_size": size, "training.global_batch_size": None}
            candidate = judge(work, config, cluster, sized, facts)
            if candidate.refused:
                raise UsageError(candidate.refused)
            advance(1)
            return candidate.needed if candidate.memory is not None else float("inf")

        one = needs(1)
        if one > limit:
            return 0
        fits, size = 1, 2
        for _ in range(_MOST_TRIES - 1):
            needed = needs(size)
            guess = int(1 + (limit - one) / max(1.0, (needed - one) / (size - 1)))  # activations grow with the batch
            if needed <= limit:
                fits = size
                if size > 2:  # it was a guess already
                    break
            else:
                guess = min(guess, size - 1)
            if guess <= fits:
                break
            size = guess
    return fits
