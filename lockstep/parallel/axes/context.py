"""The axis `context`: ranks that run the same micro-batches, each on its part of every sequence.

How layers run on parts of sequences is in `lockstep.parallel.context.sequences`.

Tests: tests/parity/test_context.py
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import ClassVar, Self

import torch.distributed as dist

from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import Sent, parts_sent
from lockstep.layout import Layout
from lockstep.models.objective import Objective
from lockstep.parallel.axes.axis import Axis
from lockstep.parallel.context.sequences import (
    SequenceCut,
    apply_context,
    cut_objective,
    refuse_loss_weights,
    sum_gradients,
)
from lockstep.parallel.execution.passes import within
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.site import Site


class ContextAxis(Axis):
    """Sequences that are cut over ranks; under `reproducible` in chunks, also on one rank."""

    name: ClassVar[str] = "context"

    def __init__(self, site: Site, cut: SequenceCut, plan: Mapping[str, int]) -> None:
        super().__init__(site)
        self.cut = cut
        self._plan = plan  # name of a batch's part → the dim of its sequence

    @classmethod
    def apply(cls, site: Site) -> Self | None:
        """Decide how sequences are cut, by the model's plan."""
        distributed = site.config.distributed
        blocks = distributed.chunks_of_sequences if site.reproducible else None
        several = site.layout.context > 1
        if not several and blocks in (None, 1):
            return None
        plan = site.facts.required_context_plan()
        if blocks is not None and site.loss is not None:
            refuse_loss_weights(site.loss)
        group = site.mesh["context"].get_group() if site.mesh is not None and several else None
        cut = SequenceCut(group, blocks, distributed.context_method, site.on_send(cls.name))
        return cls(site, cut, plan)

    def apply_after_others(self) -> None:
        # dropout knows by then whether its layer is cut, too
        apply_context(self.site.facts, self.cut)

    def objective_of_parts(self, objective: Objective) -> Objective:
        return cut_objective(objective, self.cut, self._plan)

    def add_to_step_end(self, placed: ParallelModel) -> ParallelModel:
        """Sum gradients over the axis, and let the losses of its first rank count."""
        cut = self.cut
        finishers = list(placed.finishers)
        if cut.group is not None and cut.blocks is None:  # in blocks, each product sums its own
            own = list(placed.parameters.values())
            finishers.append(partial(sum_gradients, own, cut.group, cut))
        return replace(
            placed,
            finishers=finishers,
            forward=within(cut.outside, placed.forward),
            context=cut,
            adds_losses=placed.adds_losses and cut.rank == 0,
        )

    def replica_groups(
        self, placed: ParallelModel
    ) -> Iterator[tuple[dist.ProcessGroup, AbstractSet[str]]]:
        if self.cut.group is not None:
            yield self.cut.group, frozenset()

    @classmethod
    def message_cost(cls, size: float, layout: Layout, cluster: GpuCluster) -> Sent:
        return parts_sent(cls.name, size, layout, cluster)
