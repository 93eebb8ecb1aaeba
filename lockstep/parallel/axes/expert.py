"""The axis `expert`: ranks that share out the experts of each layer, and the micro-batches, too.

How rows travel and gradients of experts are summed is in `lockstep.parallel.expert`.

Tests: tests/parity/test_mixture.py
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import ClassVar, Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.config import StepConfig
from lockstep.config.checks_distributed import excluded, ranks_along
from lockstep.costs.hardware import GpuCluster, group_of
from lockstep.costs.steps import ModelSize, Sent
from lockstep.errors import Contradiction
from lockstep.layout import Layout
from lockstep.parallel.axes.axis import Axis, PartOfModel
from lockstep.parallel.axes.tensor import TensorAxis
from lockstep.parallel.execution.passes import AroundMicroBatch
from lockstep.parallel.expert import PlacedExperts, apply_experts
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.site import Site
from lockstep.parallel.tensor.cuts import train_whole
from lockstep.strategy import AUTO, strategy_named


class ExpertAxis(Axis):
    """Experts that are spread over ranks; the axis divides replicate × shard."""

    name: ClassVar[str] = "expert"

    def __init__(self, site: Site, held: PlacedExperts, replicas: dist.ProcessGroup) -> None:
        super().__init__(site)
        self.held = held
        self._replicas = replicas  # of the axis `replicate`
        self._trains_others = True  # whole DTensors for plain parameters, which `tensor` makes else

    @classmethod
    def contradictions(cls, config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
        """Yield what does not go with experts that are spread over ranks."""
        where = "distributed.expert_size"
        distributed = config.distributed
        ranks = ranks_along(config, layout, "expert")
        if ranks == 1:
            return
        name = distributed.strategy if layout is None else layout.strategy
        if name != AUTO and not strategy_named(name).goes_with(cls.name):
            what = f"experts can't be spread over {ranks} ranks under strategy {name}"
            fix = "write strategy: ddp, fsdp or pipeline, or expert_size: 1"
            yield Contradiction((where, "distributed.strategy"), what, fix)
        yield from excluded(
            "expert",
            f"experts are spread over {ranks} ranks",
            (
                (
                    "precision.param_dtype",
                    config.precision.param_dtype,
                    "fp32",
                    "experts are not gathered, and so not cast",
                ),
                (
                    "precision.fp8",
                    config.precision.fp8,
                    "none",
                    "products in fp8 have not been made for experts",
                ),
                (
                    "distributed.ddp.compression.kind",
                    distributed.ddp.compression.kind,
                    "none",
                    "it keeps whole models",
                ),
                (
                    "distributed.ddp.static_graph",
                    distributed.ddp.static_graph,
                    False,
                    "gradients of experts are not DDP's",
                ),
                (
                    "distributed.fsdp.cpu_offload",
                    distributed.fsdp.cpu_offload,
                    False,
                    "experts stay on their GPU",
                ),
            ),
        )

    @classmethod
    def apply(cls, site: Site) -> Self | None:
        held = apply_experts(
            site.facts,
            site.layout,
            site.device.type,
            exact=site.reproducible,
            on_send=site.on_send(cls.name),
        )
        if held is None:
            return None
        assert site.mesh is not None
        return cls(site, held, site.mesh["replicate"].get_group())

    def apply_after_others(self) -> None:
        """Take this rank's pieces: the axis `tensor` deals out experts first."""
        tensor = self.site.axis(TensorAxis)
        cuts = None if tensor is None else tensor.cuts
        self._trains_others = cuts is None or cuts.cut.group is None
        self.held.take_pieces(cuts)

    def local_piece(self, name: str, value: Tensor) -> Tensor:
        return self.held.piece(name, value)

    def around_passes(self, part: PartOfModel) -> Sequence[AroundMicroBatch]:
        self.held.follow(part.assign, part.scale)
        # the trees of stages take what would stand around them
        return [self.held] if self.held.exact and not part.is_stage else []

    def add_to_step_end(self, placed: ParallelModel) -> ParallelModel:
        """Train DTensors for experts, and count each of their elements once."""
        held = self.held
        own = placed.parameters
        names = [
            name
            for name, parameter in own.items()
            if name in held.shapes or (self._trains_others and not isinstance(parameter, DTensor))
        ]
        counted = set(own) if placed.counted is None else placed.counted
        groups = placed.norm_groups
        # Experts differ between replicas, too; all else is counted by the first one.
        if self._replicas.size() > 1:
            groups = [*groups, self._replicas]
            counted = counted & set(held.shapes) if self._replicas.rank() else counted
        counted = counted - set(held.shapes) if held.replicas.rank() else counted
        trained = train_whole(placed, names, held.whole, held.finish)
        return replace(trained, norm_groups=groups, counted=counted)

    @property
    def spread_names(self) -> AbstractSet[str]:
        return frozenset(self.held.shapes)

    def replica_groups(
        self, placed: ParallelModel
    ) -> Iterator[tuple[dist.ProcessGroup, AbstractSet[str]]]:
        if self.held.replicas.size() > 1:
            yield self.held.replicas, placed.kept().keys() - self.held.shapes.keys()

    @classmethod
    def message_cost(cls, size: float, layout: Layout, cluster: GpuCluster) -> Sent:
        among = group_of(cluster, layout.expert, layout.same_batch_size)
        return Sent(*among.all_to_all(size))

    @classmethod
    def step_end_cost(cls, model: ModelSize, layout: Layout, cluster: GpuCluster) -> Sent:
        """Return the sums of experts' gradients over the ranks that hold the same experts."""
        if layout.expert == 1:
            return Sent()
        parts = layout.expert * layout.tensor * layout.pipeline
        held = 4 * model.expert_parameters / parts
        group = group_of(
            cluster,
            layout.data_parallel_size // layout.expert,
            layout.expert * layout.same_batch_size,
        )
        return Sent(group.all_reduce(held), *group.bytes_sent(2 * held))
