"""The strategy `pipeline`: stages along one axis of the mesh, replicas or shards along the others.

Tests: tests/parallel/test_pipeline.py, tests/plan/test_layouts.py
"""

from collections.abc import Iterator
from typing import Any

from lockstep.config import DistributedConfig, StepConfig
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import ModelSize
from lockstep.errors import Contradiction
from lockstep.layout import Layout, layout_of_sizes
from lockstep.parallel.fsdp import describe_shards
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.pipeline.schedules import SCHEDULES
from lockstep.parallel.placement import PlacementContext
from lockstep.registry import STRATEGIES
from lockstep.strategy import Strategy, given_sizes


class Pipeline(Strategy):
    """A pipeline of ranks: each holds some stages of the model, and micro-batches run through."""

    topologies = {"pipeline": ("pipeline",)}
    divides = frozenset({"replicate", "shard"})
    splits_model = True
    shares_batches = True
    places_experts = True

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
        whole = f"{self.name}:{layout.pipeline}"
        if layout.data_parallel_size == 1:
            return whole
        return f"{whole}*" + (
            f"ddp:{layout.replicate}" if layout.shard == 1 else describe_shards(layout)
        )

    def contradictions(
        self, config: StepConfig, layout: Layout | None = None
    ) -> Iterator[Contradiction]:
        """Yield settings that stages or their schedule can't follow."""
        distributed = config.distributed
        pipeline = config.distributed.pipeline
        facts = SCHEDULES[pipeline.schedule]
        sharding = distributed.fsdp.sharding_strategy
        if facts.splits_backward and config.training.compile:
            what = f"{facts.name} splits the backward pass, which a compiled block can't"
            fix = "write compile: false, or schedule: 1F1B"
            yield Contradiction(("training.compile", "distributed.pipeline.schedule"), what, fix)
        shards = (distributed.shard_size or 1) if layout is None else layout.shard
        # FSDP2 frees the parameters of a unit after its forward pass, and hooks gather them again
        # for a backward pass that is made at once. Where the schedule makes it in two halves,
        # gradients were None or 25 % off, without an error (torch 2.13).
        if facts.splits_backward and shards > 1 and sharding in ("full_shard", "hybrid_shard"):
            what = (
                f"{sharding} frees parameters that {facts.name} still needs: its gradients would be"
                " wrong"
            )
            fix = "write sharding_strategy: shard_grad_op"
            yield Contradiction(
                ("distributed.fsdp.sharding_strategy", "distributed.pipeline.schedule"), what, fix
            )
        needed = facts.stages_per_rank
        if needed not in (None, pipeline.stages_per_rank):
            more = ", or schedule: Interleaved1F1B" if needed == 1 else ""
            what = (
                f"{facts.name} takes {needed} stage{'s' * (needed != 1)} a rank, not"
                f" {pipeline.stages_per_rank}"
            )
            fix = f"write stages_per_rank: {needed}{more}"
            yield Contradiction(
                ("distributed.pipeline.stages_per_rank", "distributed.pipeline.schedule"), what, fix
            )

    def casts_parameters(self, layout: Layout) -> bool:
        return True

    def layouts_to_plan(
        self, model: ModelSize, config: StepConfig, cluster: GpuCluster
    ) -> Iterator[dict[str, Any]]:
        gpus = cluster.num_gpus
        most = min(model.blocks, model.segments)
        sizes = [ranks for ranks in (2, 4, 8, 16, 32, 64) if gpus % ranks == 0 and ranks <= most]
        # The fewest whose stages' parameters and gradients fit whole.
        for ranks in [
            ranks for ranks in sizes if 8 * model.parameters / ranks < cluster.usable_memory
        ][:1]:
            yield {
                STRATEGIES.where: self.name,
                "distributed.pipeline_size": ranks,
                "distributed.pipeline.schedule": "1F1B",
                "distributed.shard_size": gpus // ranks,
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

    def place(self, placement: PlacementContext) -> ParallelModel:
        # torch's pipelining loads its compiler, which takes seconds
        from lockstep.parallel.pipeline.place import place

        return place(placement)
