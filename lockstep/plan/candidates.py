"""Lists the layouts of a model on a cluster, computes the memory and speed of each, and ranks them.

Tests: tests/plan/test_plan.py, tests/plan/test_layouts.py, tests/plan/test_choosing.py,
tests/plan/test_compressing.py, tests/plan/test_diloco.py
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import torch

from lockstep.config import Config, require_equation
from lockstep.costs.hardware import GIB, GpuCluster
from lockstep.costs.steps import (
    ModelSize,
    Pieces,
    Sent,
    StepTime,
    with_sent,
)
from lockstep.division import ceil_div
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.machine import accelerator
from lockstep.machine.progress import progress_of
from lockstep.plan.layouts import layout_of, layouts, model_size_of, with_layout
from lockstep.plan.messages import Messages
from lockstep.plan.rehearsal import Rehearsal, rehearse
from lockstep.plan.workload import Workload
from lockstep.strategy import known_strategies, strategy_named
from lockstep.torch_compat.fake_tensors import UNKNOWN_VALUES

_KIND_KEY = "distributed.ddp.compression.kind"
PAYS_FROM = 0.1  # fraction of a step: less is not worth the lost precision
_MOVED = 12.0 / 4.0  # bytes that casting to 16 bits and back reads and writes, per byte of fp32


def compression_advice(
    pieces: Pieces, config: Config, layout: Layout, cluster: GpuCluster, micro_batches: int
) -> list[str]:
    """Return one line if compression would shorten a step, or if it is configured and does not.

    Most bytes are sent during backward, and casting moves each number four times through the
    device's memory. Only bf16 is advised: low rank affects the loss, which no plan knows.
    """
    strategy = strategy_named(layout.strategy)
    if not strategy.in_buckets or layout.world_size == 1 or config.distributed.reproducible:
        return []
    asked = config.distributed.ddp.compression.kind
    none, bf16 = (
        strategy.step_time(
            pieces, config.replaced({_KIND_KEY: kind}).step, layout, cluster, micro_batches
        ).seconds
        for kind in ("none", "bf16")
    )
    bf16 += (
        _MOVED * pieces.parameter_bytes / (cluster.gpu.bandwidth * 1e9 * cluster.efficiency.memory)
    )
    saved = 1 - bf16 / none
    if asked == "none" and saved >= PAYS_FROM:
        take = f"would take {bf16:.3g} s a step instead of {none:.3g} ({saved:.0%} less)"
        return [f"{layout} with {_KIND_KEY}: bf16 {take}"]
    if asked in ("fp16", "bf16") and saved < PAYS_FROM:
        takes = f"{bf16:.3g} s a step, and {none:.3g} without; write none"
        return [f"{layout}: {_KIND_KEY}: {asked} does not pay here: {takes}"]
    return []


@dataclass
class Candidate:
    """One layout."""

    layout: Layout
    changes: dict[str, Any]  # the dotted keys of the config that define it
    # peak bytes on the fullest rank, by kind; None if the model's state alone is too large
    memory: dict[str, int] | None = None
    least: float = 0.0  # lower bound of the bytes that it needs
    step: StepTime | None = None  # None if it is far too large
    samples: int = 0  # per step, over all ranks
    model_flops: float = 0.0  # per step, over all ranks, without recomputation
    refused: str = ""  # the reason if it is impossible
    limit: float = 0.0  # usable bytes of a GPU
    notes: list[str] = field(default_factory=list)  # lines about it

    @property
    def needed_bytes(self) -> float:
        """Bytes on the fullest rank."""
        return sum(self.memory.values()) if self.memory is not None else self.least

    @property
    def fits(self) -> bool:
        """Return whether it is possible and fits into the memory."""
        return not self.refused and self.memory is not None and self.needed_bytes <= self.limit

    @property
    def samples_per_second(self) -> float:
        """Samples per second over all ranks; 0 if unknown."""
        return self.samples / self.step.seconds if self.step is not None else 0.0

    @property
    def checkpointing(self) -> str:
        """The mode of activation checkpointing."""
        return str(self.changes.get("training.gradient_checkpointing", ""))

    def name(self) -> str:
        """Return the layout's name in tables."""
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
    work: Workload,
    config: Config,
    cluster: GpuCluster,
    *,
    low: bool = True,
    pipelines: bool = True,
    shows: bool = True,
    first: Callable[[Candidate], None] = lambda _candidate: None,
    processes: int = 1,
) -> list[Candidate]:
    """Evaluate all relevant layouts, and return them, the best first.

    Args:
        low: whether to include bf16 weights, which change results.
        first: called with the first layout whose memory is known, long before all are; maybe in
            another process.
        processes: how many layouts to evaluate at a time, each in a fork of this process.
    """
    facts = model_size_of(work, config)
    considered = list(layouts(work, facts, config, cluster, low=low, pipelines=pipelines))
    known = get_context("fork").Value("b", False)

    def once(candidate: Candidate) -> None:
        with known.get_lock():
            if not known.value:
                known.value = True
                first(candidate)

    def evaluate(index: int) -> list[Candidate]:
        return _over_modes(work, config, cluster, facts, considered[index], once)

    # One of the first two has the first answer. Of the others those that take longest begin, so
    # that none is left over at the end: pipelines, then those with further axes.
    splits = [
        strategy_named(with_layout(config, option).distributed.strategy).in_stages
        for option in considered
    ]
    order = sorted(range(len(considered)), key=lambda index: (index > 1, not splits[index], -index))
    with progress_of("planning", len(considered), unit="layouts", shows=shows) as advance:
        evaluated: dict[int, list[Candidate]] = {}
        for index, of_layout in _as_computed(evaluate, order, processes):
            evaluated[index] = of_layout
            advance(1)
    candidates = [candidate for index in range(len(considered)) for candidate in evaluated[index]]
    if (
        not any(candidate.fits for candidate in candidates)
        and cluster.num_gpus > 1
        and facts.blocks
    ):
        for strategy in known_strategies(config.distributed.strategy):
            if layout := strategy.layout_with_offload():
                layout = layout | {"training.gradient_checkpointing": "full"}
                candidates.append(evaluate_layout(work, config, cluster, layout, facts))
    return sorted(
        candidates, key=lambda c: (not c.fits, -c.samples_per_second if c.fits else c.needed_bytes)
    )


def _over_modes(
    work: Workload,
    config: Config,
    cluster: GpuCluster,
    facts: ModelSize,
    layout: dict[str, Any],
    first: Callable[[Candidate], None],
) -> list[Candidate]:
    """Evaluate one layout with each mode of checkpointing, the one with the least memory first."""
    candidates: list[Candidate] = []
    most = None
    tried = ("full", config.training.gradient_checkpointing, "none") if facts.blocks else ("none",)
    for mode in dict.fromkeys(tried):
        changes = {**layout, "training.gradient_checkpointing": mode}
        if most is not None and not most.fits:  # without recomputation it needs even more
            candidates.append(
                Candidate(
                    most.layout,
                    changes,
                    least=most.needed_bytes,
                    limit=most.limit,
                    samples=most.samples,
                )
            )
            continue
        judged = evaluate_layout(work, config, cluster, changes, facts)
        if judged.memory is not None:
            first(judged)
        if most is None and judged.refused:
            break
        most = most or judged
        if not judged.refused:
            candidates.append(judged)
    return candidates


# of the forks; what it refers to need not be pickled
_task: Callable[[int], list[Candidate]] | None = None


def _as_computed(
    task: Callable[[int], list[Candidate]], order: Sequence[int], processes: int
) -> Iterator[tuple[int, list[Candidate]]]:
    """Yield indices and their results, computed by forked processes or in this one.

    A process that uses an accelerator can't fork.
    """
    global _task
    processes = min(processes, len(order))
    if processes < 2 or accelerator.in_use() is not None:
        yield from ((index, task(index)) for index in order)
        return
    _task = task
    try:
        # One thread in each: the threads of a pool do not live on in a fork.
        with ProcessPoolExecutor(
            processes, get_context("fork"), torch.set_num_threads, (1,)
        ) as pool:
            indices = {pool.submit(_run_task, index): index for index in order}
            yield from ((indices[future], future.result()) for future in as_completed(indices))
    finally:
        _task = None


def _run_task(index: int) -> list[Candidate]:
    assert _task is not None
    return _task(index)


class ValuesNeededError(UsageError):
    """The forward pass reads values (`.item()`, `nonzero`), which rehearsed tensors do not have."""


def evaluate_layout(
    work: Workload, config: Config, cluster: GpuCluster, changes: dict[str, Any], facts: ModelSize
) -> Candidate:
    """Evaluate memory and time of one layout.

    Raises ValuesNeededError: the model reads values of its batch.
    """
    layout = layout_of(config, cluster, changes)
    config = with_layout(config, changes)
    strategy = strategy_named(config.distributed.strategy)
    candidate = Candidate(layout, changes, limit=cluster.usable_memory)
    try:
        count = micro_batches(config, layout)
    except UsageError as error:
        candidate.refused = error.what
        return candidate
    dense, experts = apart(facts, layout)
    held = (dense / layout.shard + experts) / (layout.pipeline * layout.tensor)
    state = 0.0 if config.distributed.fsdp.cpu_offload else held * (4 + facts.optimizer_bytes)
    unsharded = (
        8 * dense / (layout.pipeline * layout.tensor)
        if strategy.in_stages and layout.shard > 1
        else 0.0
    )
    candidate.least = state + unsharded
    candidate.samples = config.training.batch_size * count * layout.data_parallel_size
    if candidate.least > candidate.limit:
        return candidate
    evaluate = _evaluate_pipeline if strategy.in_stages else _evaluate_data_parallel
    try:
        evaluate(candidate, work, config, cluster, count, facts)
    except UsageError as error:
        candidate.refused = error.what
    except UNKNOWN_VALUES as error:
        raise ValuesNeededError(
            "this model can't be planned: its forward pass reads values of its batch",
            why=f"a plan runs it without contents ({error})",
            fix=(
                "name distributed.strategy, and train a few steps: the report has the memory of"
                " each rank"
            ),
        ) from error
    return candidate


def micro_batches(config: Config, layout: Layout) -> int:
    """Return a rank's micro-batches per step.

    Raises UsageError: the config's numbers contradict each other.
    """
    training = config.training
    if training.global_batch_size is None:
        return training.accumulation
    require_equation(training, layout.batch_shares)
    return ceil_div(training.global_batch_size, training.batch_size * layout.data_parallel_size)


def apart(facts: ModelSize, layout: Layout) -> tuple[float, float]:
    """Return the number of parameters that strategies reduce, and of expert ones per rank.

    The second is the number of parameters of spread experts on one rank.
    """
    if layout.expert == 1:
        return facts.parameters, 0.0
    return facts.parameters - facts.expert_parameters, facts.expert_parameters / layout.expert


def pieces_of(facts: ModelSize, rehearsal: Rehearsal, messages: Messages, layout: Layout) -> Pieces:
    """Return the parts of a step; its passes include messages that ranks wait for."""
    computed = rehearsal.work
    each = 4 / layout.tensor
    dense, _ = apart(facts, layout)
    rest = facts.parameters - facts.units * facts.unit_parameters
    return Pieces(
        facts.units,
        each * (dense - rest) / max(1, facts.units),
        each * rest,
        messages.seconds(computed.forward),
        messages.seconds(computed.backward),
        messages.seconds(computed.update),
        facts.low_rank_bytes,
        messages.are_told(computed.forward, computed.backward, computed.update),
    )


def _evaluate_data_parallel(
    candidate: Candidate,
    work: Workload,
    config: Config,
    cluster: GpuCluster,
    count: int,
    facts: ModelSize,
) -> None:
    """Fill in a candidate's memory and time, from a rehearsal of one rank's step."""
    layout = candidate.layout
    rehearsal = rehearse(
        work, config, layout, micro_batches=count, device_type=_device_type(cluster)
    )
    candidate.memory = memory = dict(rehearsal.peak.parts)
    if config.distributed.fsdp.cpu_offload:
        moved = [memory.pop(kind) for kind in ("parameters", "optimizer", "gradients")]
        candidate.notes.append(f"{sum(moved) / GIB:.1f} GiB a rank in host memory")
    strategy = strategy_named(layout.strategy)
    memory["parameters"] += round(strategy.further_state(config.step, facts.parameters))
    messages = Messages(layout, cluster)
    pieces = pieces_of(facts, rehearsal, messages, layout)
    groups = cluster.of_batch_groups(layout.same_batch_size)
    alone = layout.alone()
    step = strategy.step_time(pieces, config.step, alone, groups, count)
    each = messages.of(rehearsal.work.forward.plus(rehearsal.work.backward))
    waited = messages.of(rehearsal.work.update).plus(each, count)
    candidate.step = with_sent(step, waited, messages.at_last(facts))
    if layout.same_batch_size * layout.expert == 1:
        candidate.notes += compression_advice(pieces, config, layout, cluster, count)
    computing = layout.data_parallel_size * layout.same_batch_size
    candidate.model_flops = 3.0 * rehearsal.work.forward.flops * count * computing


def _device_type(cluster: GpuCluster) -> str:
    return "cpu" if cluster.gpu.name == "CPU" else "cuda"


def _evaluate_pipeline(
    candidate: Candidate,
    work: Workload,
    config: Config,
    cluster: GpuCluster,
    count: int,
    facts: ModelSize,
) -> None:
    """Fill in a candidate's memory and time, from rehearsals of its first, middle and last rank."""
    from lockstep.parallel.pipeline.plan import StageTime, pipeline_step
    from lockstep.plan.stages import rehearse_rank  # loads torch's compiler

    layout = candidate.layout
    rehearsals = {
        rank: rehearse_rank(
            work, config, layout, rank, micro_batches=count, device_type=_device_type(cluster)
        )
        for rank in sorted({0, layout.pipeline // 2, layout.pipeline - 1})
    }
    fullest = max(rehearsals.values(), key=lambda rehearsal: rehearsal.peak.total)
    candidate.memory = dict(fullest.peak.parts)
    stages: list[StageTime] = []
    flops = 0
    waited = Sent()
    messages = Messages(layout, cluster)
    per_rank = config.distributed.pipeline.stages_per_rank
    stage_bytes = 4 * apart(facts, layout)[0] / (layout.pipeline * per_rank * layout.tensor)
    if any(messages.are_told(r.work.forward, r.work.backward) for r in rehearsals.values()):
        stage_bytes = 0.0  # these messages exchange the gradients
    middle = next(iter(rehearsals[layout.pipeline // 2].stages.values()))
    for stage in range(layout.pipeline * per_rank):
        computed = next((r.stages[stage] for r in rehearsals.values() if stage in r.stages), middle)
        flops += computed.forward.flops
        sent = [messages.of(cost) for cost in (computed.forward, computed.backward)]
        if stage < per_rank:  # stages of one rank
            waited = waited.plus(sent[0].plus(sent[1]), count)
        halves = None
        if computed.halves is not None:
            of_inputs, of_weights = computed.halves
            halves = (messages.seconds(of_inputs), messages.seconds(of_weights))
        forward = messages.seconds(computed.forward)
        backward = messages.seconds(computed.backward)
        stages.append(StageTime(forward, backward, float(fullest.sent[stage]), stage_bytes, halves))
    update = max(cluster.seconds(rehearsal.work.update) for rehearsal in rehearsals.values())
    groups = cluster.of_batch_groups(layout.same_batch_size)
    alone = layout.alone()
    step = pipeline_step(stages, config.step, alone, groups, count, update)
    candidate.step = with_sent(step, waited, messages.at_last(facts))
    candidate.model_flops = 3.0 * flops * count * layout.data_parallel_size * layout.same_batch_size


_MOST_TRIES = 10


def largest_batch(
    work: Workload, config: Config, cluster: GpuCluster, changes: dict[str, Any]
) -> int:
    """Return the largest `training.batch_size` that fits under one layout.

    0 if even 1 does not fit.
    """
    facts = model_size_of(work, config)
    limit = cluster.usable_memory
    with progress_of("finding the largest batch", _MOST_TRIES, unit="tries at most") as advance:

        def needs(size: int) -> float:
            sized = {**changes, "training.batch_size": size, "training.global_batch_size": None}
            candidate = evaluate_layout(work, config, cluster, sized, facts)
            if candidate.refused:
                raise UsageError(candidate.refused)
            advance(1)
            return candidate.needed_bytes if candidate.memory is not None else float("inf")

        of_one_sample = needs(1)
        if of_one_sample > limit:
            return 0
        fits = 1
        size = 2
        for _ in range(_MOST_TRIES - 1):
            needed = needs(size)
            # activations grow with the batch
            guess = int(
                1 + (limit - of_one_sample) / max(1.0, (needed - of_one_sample) / (size - 1))
            )
            if needed <= limit:
                fits = size
                if size > 2:  # it was already a guess
                    break
            else:
                guess = min(guess, size - 1)
            if guess <= fits:
                break
            size = guess
    return fits
