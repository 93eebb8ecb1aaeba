"""The axis `tensor`: ranks that run the same micro-batches, each on its part of every layer.

How layers are cut is in `lockstep.parallel.tensor.cuts`.

Tests: tests/parity/test_tensor.py
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import ClassVar, Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.config import StepConfig
from lockstep.config.checks_distributed import excluded, ranks_along
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import Sent, parts_sent
from lockstep.errors import Contradiction, UsageError
from lockstep.layout import Layout
from lockstep.models.objective import Objective
from lockstep.parallel.axes.axis import Axis
from lockstep.parallel.axes.context import ContextAxis
from lockstep.parallel.execution.passes import within
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.site import Site
from lockstep.parallel.tensor.cuts import TensorCuts, apply_tensor, sum_over_ranks, train_whole
from lockstep.parallel.tensor.loss_parallel import with_whole_logits


class TensorAxis(Axis):
    """Layers that are cut over ranks; under `reproducible` in blocks, also on one rank."""

    name: ClassVar[str] = "tensor"

    def __init__(self, site: Site, cuts: TensorCuts) -> None:
        super().__init__(site)
        self.cuts = cuts

    @classmethod
    def contradictions(cls, config: StepConfig, layout: Layout | None) -> Iterator[Contradiction]:
        """Yield what does not go with layers that are cut over ranks."""
        distributed = config.distributed
        ranks = ranks_along(config, layout, cls.name)
        compression = distributed.ddp.compression.kind
        offload = distributed.fsdp.cpu_offload
        if ranks > 1:
            yield from excluded(
                "tensor",
                f"layers are cut over {ranks} ranks",
                (
                    (
                        "precision.fp8",
                        config.precision.fp8,
                        "none",
                        "layers in fp8 have products of their own",
                    ),
                    (
                        "distributed.ddp.compression.kind",
                        compression,
                        "none",
                        "what it keeps differs between ranks",
                    ),
                    (
                        "distributed.fsdp.cpu_offload",
                        offload,
                        False,
                        "it has not been made for cut layers",
                    ),
                ),
            )

    @classmethod
    def apply(cls, site: Site) -> Self | None:
        """Cut layers by the model's plan; one rank that has none computes them whole."""
        several = site.layout.tensor > 1
        if not several and not site.reproducible:
            return None
        if not several:
            try:
                _ = site.facts.tensor_plan
            except UsageError:  # one rank computes the layers whole
                return None
        context = site.axis(ContextAxis)
        cuts = apply_tensor(
            site.facts,
            site.mesh if several else None,
            site.config,
            None if context is None else context.cut,
            own_loss=site.facts.objective.of_model,
            on_send=site.on_send(cls.name),
        )
        return cls(site, cuts)

    def objective_of_parts(self, objective: Objective) -> Objective:
        return with_whole_logits(objective, self.cuts.cut)

    def local_piece(self, name: str, value: Tensor) -> Tensor:
        return self.cuts.piece(name, value)

    def add_to_step_end(self, placed: ParallelModel) -> ParallelModel:
        """Train DTensors in place of this rank's pieces, and count each element once."""
        cuts = self.cuts
        group = cuts.cut.group
        if group is None:
            return placed
        own = placed.parameters
        elsewhere = self.site.spread_names  # another axis trains them whole
        incomplete = [own[name] for name in sorted(cuts.partial & set(own))]
        names = [
            name
            for name, parameter in own.items()
            if name not in elsewhere and (name in cuts.dims or not isinstance(parameter, DTensor))
        ]
        counted = placed.counted
        if cuts.cut.rank:  # of what all ranks along the axis hold whole, the first counts it
            counted = (set(own) if counted is None else counted) & set(cuts.dims)
        trained = train_whole(placed, names, cuts.whole, lambda: sum_over_ranks(incomplete, group))
        return replace(
            trained,
            forward=within(cuts.cut.outside, placed.forward),
            norm_groups=[*placed.norm_groups, group],
            adds_losses=placed.adds_losses and cuts.cut.rank == 0,
            counted=counted,
        )

    def replica_groups(
        self, placed: ParallelModel
    ) -> Iterator[tuple[dist.ProcessGroup, AbstractSet[str]]]:
        if self.cuts.cut.group is not None:
            yield self.cuts.cut.group, frozenset(self.cuts.dims)

    @classmethod
    def message_cost(cls, size: float, layout: Layout, cluster: GpuCluster) -> Sent:
        return parts_sent(cls.name, size, layout, cluster)
