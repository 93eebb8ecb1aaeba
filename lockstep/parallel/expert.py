"""Expert parallel: spreads each layer's experts over the ranks of the axis `expert`.

These ranks share out the step's micro-batches, too: the axis divides replicate × shard. A rank
holds a run of experts:

    rows → all-to-all → the rows of my experts, from each rank → experts → all-to-all → rows

No row is dropped, so the ranks exchange numbers of rows first, for which the host waits. Four
experts on two ranks, with stacked weights [4, D, D], of which each holds two; each rank routes
three rows of its own micro-batch, which lie in the order of the experts:

                           rank 0                      rank 1
    its experts            0 and 1                     2 and 3
    rows for experts 0 … 3 [1, 0, 2, 0]                [0, 1, 1, 1]
    sends to ranks 0 and 1 [1, 2]                      [1, 2]
    receives, by rank      [[1, 0], [0, 1]]            [[2, 0], [1, 1]]
    so its experts run     1 row and 1 row             3 rows and 1 row

Gradients of experts are summed over the ranks that hold the same ones after the last backward pass,
or, under `reproducible`, up the tree, for which an expert runs the rows of each rank by themselves.
The axis `tensor` deals out experts first.

Source: Lepikhin et al. 2020, GShard (arXiv:2006.16668).

Tests: tests/parity/test_mixture.py, tests/parallel/test_worked_examples.py
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lockstep.config.checks_training import divisors
from lockstep.data.batches import AssignAnyRank
from lockstep.errors import UsageError
from lockstep.layout import Layout
from lockstep.models.chain import look_up
from lockstep.parallel.changes import replace_method
from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.parallel.facts import ModelFacts
from lockstep.parallel.reproducible.tree import (
    Partials,
    clear_zero_signs,
    nodes_that_cover,
    tree_all_reduce,
)
from lockstep.parallel.strides import lay_gradients
from lockstep.parallel.tensor.cuts import TensorCuts
from lockstep.parallel.tensor.layer_cut import OnSend, with_backward
from lockstep.process_group.mesh import expert_mesh
from lockstep.torch_compat.fake_tensors import FakeTensor

Route = Callable[[Tensor], Tensor]  # rows of one order → those of all ranks for this one


class PlacedExperts(AroundMicroBatch):
    """The experts of a model that this rank holds.

    `exact`: their gradients are summed up the tree.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        shapes: Mapping[str, torch.Size],
        layout: Layout,
        *,
        exact: bool,
        on_send: OnSend | None = None,
    ) -> None:
        self.mesh = mesh
        self.shapes = dict(shapes)
        self.exact = exact
        # half a millisecond each
        self._along = mesh["expert"]
        self._along_both = mesh["tensor", "expert"]
        self.group = self._along.get_group()
        self.replicas = mesh["expert_replicate"].get_group()
        self.ranks = self.group.size()
        self.rank = self.group.rank()
        # How a step's micro-batches go to ranks, and what gradients are multiplied by where a
        # strategy's own reduction takes a mean: see `follow`.
        self._assign: AssignAnyRank | None = None
        self._scale = 1.0
        self._on_send = on_send  # called with the bytes of rows that this rank sends
        self._layout = layout
        # name → the module, and the parameter's name there
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        self._dealt: set[str] = set()  # names of what the axis `tensor` cuts, too
        # of this micro-batch: name → gradient of each rank's rows
        self._leaves: dict[str, list[Tensor | None]] = {}
        # names of what ran together → its sums
        self._partials: dict[tuple[str, ...], Partials] = {}
        self._micro_batches = self._rounds = 0

    # ---- parameters ----

    def piece(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's piece of a parameter's value, in memory of its own.

        All of it where it is not an expert's.
        """
        if name not in self.shapes:
            return full
        return full.chunk(self.ranks, 0)[self.rank].clone(memory_format=torch.contiguous_format)

    def whole(self, name: str, piece: Tensor) -> DTensor:
        """Return the complete tensor, of which `piece` is this rank's."""
        if name not in self.shapes:  # optimizers take DTensors or plain tensors, not both
            return DTensor.from_local(piece, self._along, [Replicate()], run_check=False)
        shape = self.shapes[name]
        strides = torch.empty(shape, device="meta").stride()
        mesh = self._along_both if name in self._dealt else self._along
        return DTensor.from_local(
            piece, mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=shape, stride=strides
        )

    def _parameters(self) -> list[nn.Parameter]:
        """Return the experts' parameters, as they are now: a model that leaves meta gets others."""
        return [self._parameter(name) for name in self._owners]

    def _parameter(self, name: str) -> nn.Parameter:
        module, attribute = self._owners[name]
        return module.get_parameter(attribute)

    def take_pieces(self, cuts: TensorCuts | None) -> None:
        """Keep this rank's experts, after the axis `tensor` has cut what it cuts."""
        tensor = 1
        if cuts is not None and cuts.cut.group is not None:
            self._dealt = set(self.shapes) & set(cuts.dims)
            tensor = cuts.cut.ranks
        for name, shape in self.shapes.items():
            ranks = self.ranks * (tensor if name in self._dealt else 1)
            if not shape or shape[0] % ranks:
                raise self._cannot_share(name, shape, ranks)
            self._parameter(name).data = self.piece(name, self._parameter(name).data)

    def _cannot_share(self, name: str, shape: torch.Size, ranks: int) -> UsageError:
        """Return the error for experts that do not divide among so many ranks, with what does."""
        ranks_along_tensor = ranks // self.ranks
        dealt = ""
        if name in self._dealt:
            dealt = f" ({self.ranks} along expert × {ranks_along_tensor} along tensor)"
        num_experts = shape[0] if shape else "no"
        what = f"{name} has {num_experts} experts, which {ranks} ranks{dealt} can't share"
        if not shape:
            fix = "stack it over experts in dim 0"
            return UsageError(what, where="distributed.expert_size", fix=fix)

        fix = f"give the model a multiple of {ranks} experts"
        # sizes that divide this one go on these ranks
        each, rest = divmod(shape[0], ranks_along_tensor)
        sizes = [] if rest else divisors(math.gcd(each, self.ranks), self.ranks)
        if sizes:
            fix = f"write expert_size: {' or '.join(map(str, sizes))}, or {fix}"
        return UsageError(what, where="distributed.expert_size", fix=fix)

    # ---- messages ----

    def place_module(self, module: nn.Module, names: Mapping[int, str]) -> None:
        """Let a module of experts exchange the rows.

        `names`: id of a parameter → its canonical name.
        """
        full_names = {
            attribute: names[id(parameter)] for attribute, parameter in module.named_parameters()
        }
        self._owners |= {full: (module, attribute) for attribute, full in full_names.items()}
        plain = copy.copy(module)  # with the same parameters, and its own forward pass

        def forward(this: nn.Module, rows: Tensor, counts: list[int]) -> Tensor:
            """Send rows to the ranks of their experts, run those that come, and send them back."""
            counts_by_rank = self._exchange_counts(counts, rows)
            there, back = self._routes(counts, counts_by_rank)
            arrived = with_backward(there, back, rows)
            if self.exact:
                copies = self._lent_copies(this, full_names)
                outputs = _by_rank(plain, copies, arrived, counts_by_rank)
            else:
                held = {attribute: look_up(this, attribute) for attribute in full_names}
                outputs = _by_expert(plain, held, arrived, counts_by_rank)
            return with_backward(back, there, outputs)

        def to_lend(this: nn.Module) -> dict[str, Tensor]:
            return self._copies(this, full_names)

        replace_method(module, MethodType(forward, module), by="expert")
        if self.exact:
            replace_method(module, MethodType(to_lend, module), by="expert", method="to_lend")

    def _routes(self, counts: list[int], counts_by_rank: list[list[int]]) -> tuple[Route, Route]:
        """Return the exchange that brings rows to the ranks of their experts, and the way back.

        Args:
            counts: this rank's rows for each expert of all ranks.
            counts_by_rank: the rows of each rank for each expert here.
        """
        each = len(counts) // self.ranks
        sent = [sum(counts[begin : begin + each]) for begin in range(0, len(counts), each)]
        received = [sum(of_rank) for of_rank in counts_by_rank]
        there = partial(self.all_to_all, sent=sent, received=received)
        back = partial(self.all_to_all, sent=received, received=sent)
        return there, back

    def _copies(self, module: nn.Module, full_names: Mapping[str, str]) -> dict[str, Tensor]:
        """Return each parameter for the rows of each rank: {attribute@rank: tensor}."""
        return {
            f"{attribute}@{rank}": copy
            for attribute, full in full_names.items()
            for rank, copy in enumerate(self._for_each_rank(look_up(module, attribute), full))
        }

    def _lent_copies(self, module: Any, full_names: Mapping[str, str]) -> dict[str, Tensor]:
        """Return those copies; a product that runs chunk by chunk has lent its own to the module.

        It has summed the gradients of these.
        """
        names = [f"{attribute}@{rank}" for attribute in full_names for rank in range(self.ranks)]
        if hasattr(module, names[0]):
            return {name: getattr(module, name) for name in names}
        return self._copies(module, full_names)

    def _exchange_counts(self, counts: list[int], rows: Tensor) -> list[list[int]]:
        """Return, for each rank, its numbers of rows for each expert here.

        In a dry run each rank has as many as this one.
        """
        if isinstance(rows, FakeTensor):
            each = len(counts) // self.ranks
            return [counts[self.rank * each : (self.rank + 1) * each]] * self.ranks
        mine = torch.tensor(counts, device=rows.device)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=self.group)
        return theirs.view(self.ranks, -1).tolist()  # host waits for the device

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Return the rows of all ranks for this one, in the order of the ranks.

        Shapes: [Σ sent, D] → [Σ received, D].
        """
        if self._on_send is not None:
            self._on_send((sum(sent) - sent[self.rank]) * rows[0:1].numel() * rows.element_size())
        out = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out

    # ---- gradients ----

    def follow(self, assign: AssignAnyRank, scale: float = 1.0) -> None:
        """Sum gradients as a strategy assigns micro-batches to ranks.

        `scale`: what gradients are multiplied by, where the strategy's own reduction takes a mean.
        """
        self._assign = assign
        self._scale = scale

    def _for_each_rank(self, parameter: Tensor, name: str) -> tuple[Tensor, ...]:
        """Return a parameter for the rows of each rank; their gradients are kept apart."""

        def keep(*gradients: Tensor) -> None:
            # A layer that is called several times in a micro-batch has one leaf, their sum.
            held = self._leaves.setdefault(name, [None] * self.ranks)
            for rank, gradient in enumerate(gradients):
                before = held[rank]
                held[rank] = gradient if before is None else before + gradient

        return with_backward(
            lambda p: tuple(p.view_as(p) for _ in range(self.ranks)), keep, parameter
        )

    def begin(self, micro_batches: int) -> None:
        self._micro_batches = micro_batches
        self._partials.clear()

    def after(self, passing: MicroBatchPass) -> None:
        """Add the leaves of micro-batches that the axis's ranks ran together, for exact sums."""
        if not self._rounds:
            self.begin(passing.micro_batches_per_step)
        self.add_leaves(self._rounds, self._owners)
        self._rounds = 0 if passing.last else self._rounds + 1

    def add_leaves(self, position: int | None, names: Iterable[str]) -> None:
        """Add the last backward pass's gradients of `names`, which always come as one group.

        `position`: of the micro-batch among those that a rank runs in the step; None: no rank has
        one there.
        """
        mine = tuple(name for name in names if name in self._owners)
        if not mine:
            return
        partials = self._partials.setdefault(mine, Partials(self._micro_batches))
        for rank in range(self.ranks):
            assigned = self._assigned(self.replicas.rank() * self.ranks + rank)
            if position is not None and position < len(assigned) and assigned[position][1]:
                values = [
                    self._leaves[name][rank] if name in self._leaves else None for name in mine
                ]
                partials.add(assigned[position][0], values, owned=False)
        self._leaves.clear()

    def _assigned(self, rank: int) -> list[tuple[int, bool]]:
        assert self._assign is not None
        return self._assign(self._micro_batches, rank=rank, ranks=self._layout.data_parallel_size)

    @torch.no_grad()
    def finish(self) -> None:
        """Leave in `.grad` of this rank's experts the sum over all micro-batches of the step."""
        if not self.exact:
            for parameter in self._parameters():
                # none have those of other stages of a pipeline, which are on meta
                if parameter.grad is not None:
                    if self.replicas.size() > 1:
                        dist.all_reduce(parameter.grad, group=self.replicas)
                    parameter.grad.mul_(self._scale)
            return
        # Ranks along `expert` have exchanged rows, so a rank has the leaves of all their
        # micro-batches; those of other replicas are still to be added.
        alone = self.replicas.size() == 1
        for names in sorted(self._partials):  # all ranks in the same order
            partials = self._partials[names]
            totals = partials.total() if alone else self._summed_over_replicas(names, partials)
            for name, total in zip(names, totals or [], strict=False):
                self._parameter(name).grad = total
            clear_zero_signs([total for total in totals or [] if total is not None])
        lay_gradients(self._parameters())

    def _summed_over_replicas(
        self, names: Sequence[str], partials: Partials
    ) -> list[Tensor | None]:
        """Return the sums of `names` up the tree, over the ranks that hold the same experts."""
        leaves = partials.leaves
        nodes = [
            nodes_that_cover(
                {
                    index
                    for rank in range(first, first + self.ranks)
                    for index, real in self._assigned(rank)
                    if real
                },
                leaves,
            )
            for first in range(0, self._layout.data_parallel_size, self.ranks)
        ]
        held = [partials.take(node) for node in nodes[self.replicas.rank()]]
        totals: list[Tensor | None] = []
        for position, parameter in enumerate(map(self._parameter, names)):
            own = [None if values is None else values[position] for values in held]
            sums = [None if each is None else each.reshape(-1) for each in own]
            out = torch.empty_like(parameter).view(-1)
            tree_all_reduce(sums, out, leaves, self.replicas, nodes)
            totals.append(out.view_as(parameter))
        return totals


def apply_experts(
    facts: ModelFacts,
    layout: Layout,
    device_type: str,
    *,
    exact: bool,
    on_send: OnSend | None = None,
) -> PlacedExperts | None:
    """Let the experts of a model exchange rows over the axis `expert`, in place.

    None where that has one rank.

    The pieces are taken later (`PlacedExperts.take_pieces`): the axis `tensor` deals out experts
    first.
    """
    if layout.expert == 1:
        return None
    if not facts.experts:
        what = f"{type(facts.model).__name__} does not say which of its modules are experts"
        fix = (
            "give the model experts() -> [(name, module)], each called with (rows, rows of each"
            " expert), with parameters that are stacked over experts in dim 0; or write"
            " expert_size: 1"
        )
        raise UsageError(what, where="distributed.expert_size", fix=fix)
    shapes = {facts.names[id(p)]: p.shape for p in facts.parameters_of_experts}
    placed = PlacedExperts(
        expert_mesh(layout, device_type), shapes, layout, exact=exact, on_send=on_send
    )
    for _, module in facts.experts:
        placed.place_module(module, facts.names)
    return placed


def _by_rank(
    plain: nn.Module, copies: Mapping[str, Tensor], rows: Tensor, counts: list[list[int]]
) -> Tensor:
    """Apply the experts to the rows of each rank by themselves, for exact sums.

    Each rank's rows belong to another micro-batch, a leaf of the tree, and run with that rank's
    copies of the parameters, whose gradient is that leaf.

    Args:
        plain: a module of experts, with its own forward pass.
        copies: {attribute@rank: tensor}.
        rows: of all ranks, in the order of the ranks.
        counts: each rank's rows for each expert.
    """
    outputs = []
    rows_of_ranks = torch.split(rows, [sum(of_rank) for of_rank in counts])
    for rank, (rows_of_rank, numbers) in enumerate(zip(rows_of_ranks, counts, strict=True)):
        held = {
            name.partition("@")[0]: copy
            for name, copy in copies.items()
            if name.endswith(f"@{rank}")
        }
        outputs.append(torch.func.functional_call(plain, held, (rows_of_rank, numbers)))
    return torch.cat(outputs)


def _by_expert(
    plain: nn.Module, held: Mapping[str, Tensor], rows: Tensor, counts: list[list[int]]
) -> Tensor:
    """Apply each expert to all ranks' rows at once: [ranks, experts, …] → the same order.

    Rows come by rank, [r0e0 r0e1 r1e0 r1e1]; experts take theirs side by side,
    [r0e0 r1e0 r0e1 r1e1]; the result goes back in the order in which rows came.
    """
    ranks = len(counts)
    experts = len(counts[0])
    parts = torch.split(rows, [number for source in counts for number in source])
    together = torch.cat(
        [parts[rank * experts + expert] for expert in range(experts) for rank in range(ranks)]
    )
    numbers = [sum(source[expert] for source in counts) for expert in range(experts)]
    outputs = torch.func.functional_call(plain, dict(held), (together, numbers))
    pieces = torch.split(
        outputs, [counts[rank][expert] for expert in range(experts) for rank in range(ranks)]
    )
    return torch.cat(
        [pieces[expert * ranks + rank] for rank in range(ranks) for expert in range(experts)]
    )
