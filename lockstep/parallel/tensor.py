"""Tensor parallel alone, and context parallel alone: all ranks run every micro-batch.

How layers are cut is in `lockstep.parallel.tensor_cuts`, and how sequences are in `lockstep.parallel.context`.
"""

from lockstep.config import DistributedConfig
from lockstep.layout import Layout, layout_of_sizes
from lockstep.parallel.parallel_model import ParallelModel, assign_contiguous
from lockstep.parallel.placement import AppliedStrategy, PlacementContext, placed_in_order, shared_out
from lockstep.parallel.reproducible.gradient_trees import LocalTree
from lockstep.strategy import Strategy, given_sizes


class TensorParallel(Strategy):
    """Only the axis `tensor`: all ranks run every micro-batch, each its part of every layer."""

    topologies = {"tensor": ("tensor",)}
    shares_batches = True

    def layout(self, config: DistributedConfig, world_size: int, per_node: int) -> Layout:
        return layout_of_sizes(self.name, {}, world_size, given_sizes(config))

    def place(self, placement: PlacementContext) -> ParallelModel:
        placement.materialise()
        applied = AppliedStrategy(
            shared_out(assign_contiguous, placement),
            tree=LocalTree(list(placement.model.parameters())) if placement.reproducible else None,
        )
        return placed_in_order(placement, applied)


class ContextParallel(TensorParallel):
    """Only the axis `context`: all ranks run every micro-batch, each its part of every sequence."""

    topologies = {"context": ("context",)}
