"""Strategies whose ranks run all micro-batches: one process, or only axes `tensor` and `context`.

Every strategy on one rank becomes `single`.

Tests: tests/parity/test_data_parallel.py
"""

from collections.abc import Iterator
from typing import Any

from lockstep.config import DistributedConfig, StepConfig
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import ModelSize
from lockstep.layout import Layout, layout_of_sizes
from lockstep.parallel.parallel_model import ParallelModel, assign_contiguous
from lockstep.parallel.placement import (
    AppliedStrategy,
    PlacementContext,
    placed_in_order,
    shared_out,
)
from lockstep.parallel.reproducible.gradient_trees import LocalTree
from lockstep.registry import STRATEGIES
from lockstep.strategy import Strategy, given_sizes


class Single(Strategy):
    """The whole model on this process, which runs all micro-batches."""

    topologies = {"single": ()}
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

    def place(self, placement: PlacementContext) -> ParallelModel:
        asked = placement.layout.strategy
        if asked != self.name:
            placement.log_lines.append(f"{asked} on one rank: nothing to synchronise or to shard")
        return place_alone(placement)


class TensorParallel(Strategy):
    """Only the axis `tensor`: each rank runs its part of every layer."""

    topologies = {"tensor": ("tensor",)}
    shares_batches = True

    def layout(self, config: DistributedConfig, world_size: int, per_node: int) -> Layout:
        return layout_of_sizes(self.name, {}, world_size, given_sizes(config))

    def place(self, placement: PlacementContext) -> ParallelModel:
        return place_alone(placement)


class ContextParallel(TensorParallel):
    """Only the axis `context`: each rank runs its part of every sequence."""

    topologies = {"context": ("context",)}


def place_alone(placement: PlacementContext) -> ParallelModel:
    """Place a model whose micro-batches are not shared out."""
    placement.materialise()
    tree = LocalTree(list(placement.model.parameters())) if placement.reproducible else None
    return placed_in_order(
        placement, AppliedStrategy(shared_out(assign_contiguous, placement), tree=tree)
    )
