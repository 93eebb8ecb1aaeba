"""The axis `pipeline`: ranks that each keep stages of the model, through which micro-batches run.

How a model becomes stages, and how their passes are ordered and run, is in
`lockstep.parallel.pipeline`.

An axis beside it that shares out micro-batches finds a stage in place of the model. `shard` cuts or
replicates each of them by FSDP2: on a mesh of (replicas, 1) it replicates, and all schedules give
correct gradients with it, which does not hold for DDP. FSDP2 holds the full gradients of a rank's
stages until a step's end. Any other one stands around the passes of each stage.

Tests: tests/parallel/pipeline/test_pipeline.py, tests/parity/test_pipeline.py,
tests/seams/test_axis.py
"""

from collections.abc import Iterator
from typing import ClassVar, Self

from lockstep.config import StepConfig
from lockstep.errors import Contradiction
from lockstep.layout import Layout
from lockstep.parallel.axes.axis import Axis
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.pipeline.placing import place_stages
from lockstep.parallel.pipeline.schedules import SCHEDULES
from lockstep.parallel.site import Site
from lockstep.registry import BY_SIZE


class PipelineAxis(Axis):
    """Stages of a model: a chain of segments that is cut."""

    name: ClassVar[str] = "pipeline"
    goes_with: ClassVar[frozenset[str]] = frozenset(BY_SIZE) - {"batch_norm"}
    in_stages: ClassVar[bool] = True

    @classmethod
    def contradictions(cls, config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
        """Yield what a schedule does not go with."""
        distributed = config.distributed
        pipeline = distributed.pipeline
        sharding = distributed.fsdp.sharding_strategy
        facts = SCHEDULES[pipeline.schedule]
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

    @classmethod
    def apply(cls, site: Site) -> Self | None:
        return None if site.layout.is_one_group else cls(site)

    def place_model(self) -> ParallelModel | None:
        assert self.site.mesh is not None
        return place_stages(self.site, self.site.mesh[self.name])
