"""The strategy `pipeline`: stages along one axis of the mesh, replicas or shards along the others.

Tests: tests/parallel/pipeline/test_pipeline.py, tests/plan/test_layouts.py
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lockstep.config import DistributedConfig, StepConfig
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import ModelSize
from lockstep.layout import Layout, layout_of_sizes
from lockstep.parallel.fsdp.sharding import describe_shards
from lockstep.registry import STRATEGIES
from lockstep.strategy import Strategy, given_sizes


class Pipeline(Strategy):
    """A pipeline of ranks: each holds some stages of the model, and micro-batches run through."""

    topologies = {"pipeline": ("pipeline",)}
    divides = frozenset({"replicate", "shard"})
    axes = ("pipeline", "shard")

    def layout(self, config: DistributedConfig, world_size: int, per_node: int) -> Layout:
        shard = config.shard_size or 1
        if config.pipeline_size:
            pipeline = config.pipeline_size
            replicate = config.replicate_size or max(1, world_size // (pipeline * shard))
        else:
            replicate = config.replicate_size or 1
            pipeline = max(1, world_size // (replicate * shard))
        sizes = {"pipeline": pipeline, "replicate": replicate, "shard": shard}
        return layout_of_sizes(self.name, sizes, world_size, given_sizes(config))

    def describe(self, layout: Layout) -> str:
        stages = f"{self.name.partition('*')[0]}:{layout.pipeline}"
        if self.replicas is not None:
            return f"{stages}*{self.replicas.describe(replace(layout, pipeline=1))}"
        if layout.data_parallel_size == 1:
            return stages
        return f"{stages}*" + (
            f"ddp:{layout.replicate}" if layout.shard == 1 else describe_shards(layout)
        )

    def casts_parameters(self, layout: Layout) -> bool:
        return self.replicas is None  # FSDP2 casts them

    def layouts_to_plan(
        self, model: ModelSize, config: StepConfig, cluster: GpuCluster
    ) -> Iterator[dict[str, Any]]:
        """Yield the fewest stages whose parameters fit; further ranks divide data or parameters."""
        gpus = cluster.num_gpus
        most = min(model.blocks, model.segments)
        divided = "shard" if self.replicas is None else "replicate"
        sizes = [ranks for ranks in (2, 4, 8, 16, 32, 64) if gpus % ranks == 0 and ranks <= most]
        # The fewest whose stages' parameters and gradients fit whole.
        for ranks in [
            ranks for ranks in sizes if 8 * model.parameters / ranks < cluster.usable_memory
        ][:1]:
            yield {
                STRATEGIES.where: self.name,
                "distributed.pipeline_size": ranks,
                "distributed.pipeline.schedule": "1F1B",
                f"distributed.{divided}_size": gpus // ranks,
                "distributed.fsdp.sharding_strategy": "shard_grad_op",
            }

    def topologies_to_verify(self, config: StepConfig) -> list[str]:
        pipeline = config.distributed.pipeline
        stages = len(pipeline.split_spec) + 1
        ranks = (
            stages // pipeline.stages_per_rank
            if stages > 1
            else config.distributed.pipeline_size or 2
        )
        return [f"{self.name}:{ranks}"]
