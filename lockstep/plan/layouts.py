"""Lists the layouts that a plan considers.

They are the strategies, and the sizes of the axes tensor, context and expert.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from lockstep.config import Config
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import ModelSize
from lockstep.errors import UsageError
from lockstep.layout import SAME_BATCH, SPREADS, Layout
from lockstep.parallel.comm.compression import sent_numbers
from lockstep.parallel.fsdp.units import units_of
from lockstep.parallel.tensor.plan import plan_of
from lockstep.plan.workload import Workload
from lockstep.strategy import known_strategies, resolve

LARGE = 5e9  # parameters
LONG = 32_768  # tokens in a sample from which cut sequences are considered
SHARE = 8_192  # of them that are left to a rank
# the config has the rest
_NO_SIZES = {f"distributed.{axis}_size": None for axis in ("pipeline", "replicate", "shard")}
# Of muon, those of matrices: what is AdamW's is a small part of a large model.
_OPTIMIZER_BYTES = {"adamw": 8.0, "adam": 8.0, "sgd": 0.0, "muon": 4.0}


def model_size_of(work: Workload, config: Config) -> ModelSize:
    """Return the sizes of a config's model that do not depend on its layout."""
    model = work.description
    facts = work.facts
    *units, _root = units_of(facts, config.distributed.fsdp)
    held = sum(p.numel() for unit in units for p in unit.module.parameters())
    momentum = config.training.optimizer_args.get("momentum")
    optimizer = 4.0 if momentum else _OPTIMIZER_BYTES.get(config.training.optimizer, 0.0)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    low_rank = sent_numbers(shapes, "powersgd", config.distributed.ddp.compression.rank)
    return ModelSize(
        facts.num_parameters,
        len(facts.blocks),
        len(facts.chain or ()),
        len(units),
        held / len(units) if units else 0.0,
        optimizer,
        4 * low_rank,
        sum(p.numel() for p in facts.parameters_of_experts),
    )


def layouts(
    work: Workload,
    facts: ModelSize,
    config: Config,
    cluster: GpuCluster,
    *,
    low: bool,
    pipelines: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the layouts to plan, as keys of the config; `low` includes bf16 weights."""
    low &= (
        cluster.gpu.has_bf16
        and config.precision.mode == "bf16"
        and not config.distributed.reproducible
    )
    narrow = {"precision.param_dtype": "bf16"}
    # Autocast keeps copies of fp32 weights; for large models only weights gathered in bf16 are
    # useful.
    widths: list[dict[str, str]] = [{}]
    if low:
        widths = [narrow] if facts.parameters > LARGE else [{}, narrow]
    for axes in axes_to_plan(work, facts, config, cluster):
        sizes = {
            a: axes.get(f"distributed.{a}_size", getattr(config.distributed, f"{a}_size")) or 1
            for a in SPREADS
        }
        several = [axis for axis, size in sizes.items() if size > 1]
        held = replace(facts, parameters=facts.parameters // sizes["tensor"])
        for strategy in known_strategies(config.distributed.strategy):
            if strategy.in_stages and not pipelines:
                continue
            if not all(map(strategy.goes_with, several)):
                continue
            groups = cluster.of_batch_groups(math.prod(sizes[axis] for axis in SAME_BATCH))
            of_strategy = strategy.layouts_to_plan(held, config.step, groups)
            # one of each: a plan is wanted soon
            for layout in islice(of_strategy, 1) if axes else of_strategy:
                try:
                    cuts = strategy.cuts_parameters(layout_of(config, cluster, layout | axes))
                except UsageError:  # the ranks that are left can't share out experts
                    continue
                # parameters of experts are not gathered, and so not cast
                if not cuts or sizes["expert"] > 1:
                    yield layout | axes
                else:
                    yield from (
                        layout | axes | width
                        for width in (widths[-1:] if strategy.in_stages else widths)
                    )


def axes_to_plan(
    work: Workload, facts: ModelSize, config: Config, cluster: GpuCluster
) -> Iterator[dict[str, Any]]:
    """Yield the sizes of the axes tensor, context and expert to plan with, as keys of the config.

    Unless the config has one of them: layers of a large model cut inside of a node, long samples
    over as many ranks as leave each of them `SHARE` tokens, experts spread inside of a node and as
    far as they go.
    """
    distributed = config.distributed
    gpus = cluster.num_gpus
    yield {}
    if gpus == 1 or any(getattr(distributed, f"{axis}_size") for axis in SPREADS):
        return
    context = 1
    tokens = work.tokens_per_sample()
    if tokens >= LONG and work.facts.context_plan is not None:
        context = _power_of_two(tokens // SHARE, gpus)
        if distributed.reproducible and distributed.chunks_of_sequences % context:
            context = 1
    long = {"distributed.context_size": context} if context > 1 else {}
    if long:
        yield long
    tensor = _power_of_two(cluster.per_node, gpus // context)
    own = work.facts.methods.get("tensor_plan")
    if facts.parameters > LARGE and tensor > 1 and plan_of(work.description, own) is not None:
        yield {"distributed.tensor_size": tensor, **long}
    experts = next((p.shape[0] for p in work.facts.parameters_of_experts if p.ndim), 1)
    for size in sorted({math.gcd(experts, cluster.per_node), math.gcd(experts, gpus)} - {1}):
        yield {"distributed.expert_size": size}


def _power_of_two(most: int, of: int) -> int:
    """Return the largest power of two that is at most `most` and divides `of`."""
    return max(1 << power for power in range(max(1, most).bit_length()) if of % (1 << power) == 0)


def layout_of(config: Config, cluster: GpuCluster, changes: dict[str, Any]) -> Layout:
    """Return the layout of a config with these changes on all GPUs.

    Raises UsageError: sizes do not fit.
    """
    return resolve(with_layout(config, changes).distributed, cluster.num_gpus, cluster.per_node)


def with_layout(config: Config, changes: dict[str, Any]) -> Config:
    """Return the config with these changes.

    They replace its sizes of pipeline, replicate and shard.
    """
    return config.replaced(_NO_SIZES | changes)
