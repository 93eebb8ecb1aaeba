"""Strategies whose ranks run all micro-batches: one process, or only axes `tensor` and `context`.

Every strategy on one rank becomes `single`.

Tests: tests/parity/test_data_parallel.py
"""

from collections.abc import Iterator
from typing import Any

from lockstep.config import DistributedConfig, StepConfig
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import ModelSize
from lockstep.layout import SAME_BATCH, Layout, layout_of_sizes
from lockstep.registry import STRATEGIES
from lockstep.strategy import Strategy, given_sizes


class Single(Strategy):
    """The whole model on this process, which runs all micro-batches."""

    topologies = {"single": ()}
    axes = ()
    one_process = "strategy single is one process"

    def layout(self, config: DistributedConfig, world_size: int, per_node: int) -> Layout:
        return Layout(self.name)

    def instead_of_compression(self, kind: str) -> str | None:
        return None  # nothing is sent

    def layouts_to_plan(
        self, model: ModelSize, config: StepConfig, cluster: GpuCluster
    ) -> Iterator[dict[str, Any]]:
        if cluster.num_gpus == 1:
            yield {STRATEGIES.where: self.name}


class TensorParallel(Strategy):
    """Only the axis `tensor`: each rank runs its part of every layer."""

    topologies = {"tensor": ("tensor",)}
    axes = ()
    beside = frozenset(SAME_BATCH)
    holds_parts = True

    def layout(self, config: DistributedConfig, world_size: int, per_node: int) -> Layout:
        return layout_of_sizes(self.name, {}, world_size, given_sizes(config))


class ContextParallel(TensorParallel):
    """Only the axis `context`: each rank runs its part of every sequence."""

    topologies = {"context": ("context",)}
    holds_parts = False
