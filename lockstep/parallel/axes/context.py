"""The axis `context`: ranks that run the same micro-batches, each on its part of every sequence.

How layers run on parts of sequences is in `lockstep.parallel.context`.

Tests: tests/parity/test_context.py
"""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import ClassVar, Self

import torch.distributed as dist

from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import Sent, parts_sent
from lockstep.errors import UsageError, listed
from lockstep.layout import Layout
from lockstep.models.attention import Attend
from lockstep.models.hf_layers import advice_for_object
from lockstep.models.objective import Objective
from lockstep.parallel.axes.axis import Axis
from lockstep.parallel.context import apply_context, cut_objective
from lockstep.parallel.context_attention import SequenceCut
from lockstep.parallel.facts import ModelFacts
from lockstep.parallel.loss_weights import LossWeights
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.passes import within
from lockstep.parallel.site import Site
from lockstep.parallel.tensor_cuts import sum_over_ranks
from lockstep.tensors import local

_FLOAT = 4  # bytes of a number of a gradient


class ContextAxis(Axis):
    """Sequences that are cut over ranks; under `reproducible` in chunks, also on one rank."""

    name: ClassVar[str] = "context"

    def __init__(self, site: Site, cut: SequenceCut, plan: Mapping[str, int]) -> None:
        super().__init__(site)
        self.cut = cut
        self._plan = plan  # name of a batch's part → the dim of its sequence

    @classmethod
    def on(cls, site: Site) -> Self | None:
        """Decide how sequences are cut, by the model's plan."""
        distributed = site.config.distributed
        blocks = distributed.chunks_of_sequences if site.reproducible else None
        several = site.layout.context > 1
        if not several and blocks in (None, 1):
            return None
        plan = plan_of(site.facts)
        if blocks is not None and site.loss is not None:
            _refuse_weights(site.loss)
        group = site.mesh["context"].get_group() if site.mesh is not None and several else None
        cut = SequenceCut(group, blocks, distributed.context_method, site.on_send(cls.name))
        return cls(site, cut, plan)

    def after_others(self) -> None:
        # dropout knows by then whether its layer is cut, too
        apply_context(self.site.facts, self.cut)

    def objective(self, objective: Objective) -> Objective:
        return cut_objective(objective, self.cut, self._plan)

    def trained(self, placed: ParallelModel) -> ParallelModel:
        """Sum gradients over the axis, and let the losses of its first rank count."""
        cut = self.cut
        group = cut.group
        own = list(placed.parameters.values())

        def sum_gradients() -> None:
            assert group is not None
            sum_over_ranks(own, group)
            if cut.on_send is not None:
                numbers = sum(local(p.grad).numel() for p in own if p.grad is not None)
                cut.on_send(2 * _FLOAT * numbers * (cut.ranks - 1) // cut.ranks)

        sums = group is not None and cut.blocks is None  # in blocks, each product sums its own
        return replace(
            placed,
            finishers=[*placed.finishers, sum_gradients] if sums else placed.finishers,
            forward=within(cut.outside, placed.forward),
            context=cut,
            adds_losses=placed.adds_losses and cut.rank == 0,
        )

    def replicas(
        self, placed: ParallelModel
    ) -> Iterator[tuple[dist.ProcessGroup, AbstractSet[str]]]:
        if self.cut.group is not None:
            yield self.cut.group, frozenset()

    @classmethod
    def sent(cls, size: float, layout: Layout, cluster: GpuCluster) -> Sent:
        return parts_sent(cls.name, size, layout, cluster)


def plan_of(facts: ModelFacts) -> Mapping[str, int]:
    """Return name of a batch's part → the dim of its sequence.

    The model must have a plan and a module that attends; else this is a UsageError.
    """
    model = facts.model
    plan = facts.context_plan
    if plan and any(isinstance(module, Attend) for module in model.modules()):
        return plan
    missing = (
        "does not say how its sequences are cut"
        if plan is None
        else "has no lockstep.models.attention.Attend"
    )
    what = f"sequences of {type(model).__name__} can't be cut over ranks: it {missing}"
    why = "each rank has a part of every sequence, and positions meet in attention"
    fix = (
        "let its attention be self.attend = Attend(), called as self.attend(q, k, v), and give it"
        " context_plan() "
    )
    fix += '-> {"input_ids": 1, "targets": 1}: the dims of a batch along which its sequences lie'
    fix = advice_for_object(model, "context") or fix
    raise UsageError(what, where="distributed.context_size", why=why, fix=fix)


def _refuse_weights(loss: LossWeights) -> None:
    """Refuse a loss function with weights of its own, which sees complete sequences."""
    if not loss.any:
        return
    what = f"the loss function has weights of its own: {listed(list(loss.own))}"
    why = "under reproducible the gradient of each parameter is a sum over chunks of sequences"
    fix = "let the model hold them and compute loss(outputs, batch), or write reproducible: false"
    raise UsageError(what, where="distributed.context_blocks", why=why, fix=fix)
