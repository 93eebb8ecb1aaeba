"""Sums of gradients up the tree, while backward passes run: one process, ddp, and FSDP2.

The step's sum is one tree over micro-batches (`lockstep.parallel.reproducible.tree`). Four of them
on two ranks, a weight [4, 6]:

`ddp:2`, where a rank reduces once a step: rank 0 runs micro-batches 0 and 1 and adds g0 + g1
[4, 6], rank 1 adds g2 + g3. A bucket's communication hook exchanges halves of these sums, and each
rank adds (g0 + g1) + (g2 + g3) of its half.

`fsdp:2`, where a rank holds two rows of the weight and reduces after each micro-batch:

                           rank 0                      rank 1
    round 0, runs          micro-batch 0               micro-batch 1
      receives             g0[0:2] and g1[0:2]         g0[2:4] and g1[2:4]
      holds                (g0 + g1)[0:2]              (g0 + g1)[2:4]
    round 1, runs          micro-batch 2               micro-batch 3
      receives             g2[0:2] and g3[0:2]         g2[2:4] and g3[2:4]
      holds                the step's sum[0:2]         the step's sum[2:4]

So the reduce-scatter is an all-to-all here, which brings a rank its shard of each leaf in as many
bytes; a plain one would add leaves in an order that depends on the ranks. FSDP2 gets the axis shard
alone: its all-reduce over replicas can't be replaced, but a hook after the reduce-scatter does what
it would do.

Tests: tests/parallel/reproducible/test_tree.py, tests/parity/test_same_bits.py,
tests/parity/test_shared_inputs.py
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs lack it
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lockstep.data.batches import MicroBatch
from lockstep.errors import UsageError
from lockstep.parallel.comm.gloo import AllToAll, InNewBuffers
from lockstep.parallel.execution.passes import AroundMicroBatch, MicroBatchPass
from lockstep.parallel.reproducible.tree import (
    Node,
    Partials,
    TreeAllReduce,
    clear_zero_signs,
    leaves_of,
    nodes_that_cover,
    tree_all_reduce,
    tree_assignment,
)
from lockstep.parallel.strides import lay_gradients
from lockstep.tensors import local


class GradientTree(AroundMicroBatch):
    """A sum of gradients in one fixed order, which `finish` leaves in this rank's `.grad`."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = parameters

    def finish(self) -> None:
        clear_zero_signs([local(p.grad) for p in self.parameters if p.grad is not None])


class LocalTree(GradientTree):
    """A tree over the micro-batches that this rank runs, which leaves the step's sum in `.grad`.

    A rank holds ⌈log₂ K⌉ + 1 copies of the gradients for K micro-batches of its own. A subclass
    that exchanges with other ranks overrides `add_up`; `partials.take(node)` returns the sums of
    one of the nodes that this rank has run.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__(parameters)
        self.partials = Partials(0)

    def before(self, passing: MicroBatchPass) -> None:
        if not len(self.partials):
            self.partials = Partials(passing.micro_batches_per_step)

    def after(self, passing: MicroBatchPass) -> None:
        if passing.micro_batch.real:
            self.partials.add(passing.micro_batch.index, [p.grad for p in self.parameters])
        for parameter in self.parameters:
            parameter.grad = None
        if passing.last:
            self.add_up()

    def add_up(self) -> None:
        for parameter, total in zip(self.parameters, self.partials.total() or [], strict=False):
            parameter.grad = total


class ExchangedTree(LocalTree):
    """A tree over a rank's micro-batches and, once a step, over replicas of complete parameters.

    `group` is that of the replicas, as `placement.dp_group` has it: None where they are all ranks.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        super().__init__(parameters)
        replicas = dist.group.WORLD if group is None else group
        assert replicas is not None, "torch.distributed is not initialized"
        self._group = replicas

    def add_up(self) -> None:
        leaves = self.partials.leaves
        nodes = tree_assignment(leaves, self._group.size())[self._group.rank()]
        held = [self.partials.take(node) for node in nodes]
        sums = [None if values is None else self._flat(values) for values in held]
        total = self._flat([None] * len(self.parameters))
        tree_all_reduce(sums, total, leaves, self._group)
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, piece in zip(self.parameters, torch.split(total, sizes), strict=True):
            parameter.grad = piece.view_as(parameter)
        lay_gradients(self.parameters)

    def _flat(self, values: Sequence[Tensor | None]) -> Tensor:
        both = zip(self.parameters, values, strict=True)
        return torch.cat(
            [torch.zeros_like(p).flatten() if v is None else v.flatten() for p, v in both]
        )


class ReplicaTree(GradientTree):
    """The sum over replicas under DDP, in a communication hook that reduces buckets up the tree.

    The all-to-all of a bucket starts when the bucket is ready; its fold and its all-gather follow
    when the next bucket is: one bucket behind, so that nothing waits for the network while there is
    backward work left to hide it.
    """

    def __init__(self, model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        super().__init__([p for p in model.parameters() if p.requires_grad])
        self._positions = {id(p): position for position, p in enumerate(self.parameters)}
        self._group = group
        self._partials = Partials(0)
        self._micro_batch: MicroBatch | None = None
        # whether a backward pass may leave parameters out
        self._may_miss = model.find_unused_parameters
        # positions of those that earlier micro-batches of the step used
        self._used_before: set[int] = set()
        self._folding: tuple[TreeAllReduce, Tensor] | None = None  # the all-to-all runs
        self._gathering: list[tuple[TreeAllReduce, Tensor]] = []  # the all-gather runs
        model.register_comm_hook(None, self._reduce)

    def before(self, passing: MicroBatchPass) -> None:
        if self._micro_batch is None:
            self._partials = Partials(passing.micro_batches_per_step)
        self._micro_batch = passing.micro_batch
        if passing.last:
            # DDP remembers what earlier micro-batches of the step used, and wants a gradient of it
            # to reduce.
            for position in self._used_before:
                self.parameters[position].grad = torch.zeros_like(self.parameters[position])
            self._used_before.clear()

    def after(self, passing: MicroBatchPass) -> None:
        if passing.last:
            assert self._folding is None
            self._micro_batch = None
            return
        if passing.micro_batch.real:
            self._partials.add(passing.micro_batch.index, [p.grad for p in self.parameters])
        for position, parameter in enumerate(self.parameters):
            if parameter.grad is not None and self._may_miss:
                self._used_before.add(position)
            parameter.grad = None

    def _reduce(self, _state: None, bucket: GradBucket) -> Future[Tensor]:
        """Start a bucket's exchange, and go on with that of the bucket before."""
        flat = bucket.buffer()
        sums = self._sums(bucket)
        self._fold()
        self._folding = TreeAllReduce(sums, flat, self._partials.leaves, self._group), flat
        if bucket.is_last():
            self._fold()
            for reduce, out in self._gathering:
                reduce.finish(out)
            self._gathering.clear()
        # DDP reads the result at the end of the backward pass: by then the last bucket has finished
        # all of them.
        done: Future[Tensor] = Future()
        done.set_result(flat)
        return done

    def _fold(self) -> None:
        if self._folding is not None:
            self._folding[0].fold()
            self._gathering.append(self._folding)
            self._folding = None

    def _sums(self, bucket: GradBucket) -> list[Tensor | None]:
        """Return the sums over this rank's nodes for a bucket, in the layout of the bucket."""
        assert self._micro_batch is not None
        partials = self._partials.move_out([self._positions[id(p)] for p in bucket.parameters()])
        if self._micro_batch.real:
            partials.add(self._micro_batch.index, [*_views(bucket.buffer(), bucket)], owned=False)
        nodes = tree_assignment(partials.leaves, self._group.size())[self._group.rank()]
        held = [partials.take(node) for node in nodes]
        return [None if values is None else _flat(values, bucket) for values in held]


def _flat(values: Sequence[Tensor | None], bucket: GradBucket) -> Tensor:
    flat = torch.zeros_like(bucket.buffer())
    for value, view in zip(values, _views(flat, bucket), strict=True):
        if value is not None:
            view.copy_(value)
    return flat


def _views(flat: Tensor, bucket: GradBucket) -> list[Tensor]:
    """Return the gradients in a tensor with a bucket's layout, in their parameters' memory formats.

    `bucket.gradients()` takes the memory of a parameter in `channels_last` for one that lies row by
    row.
    """
    offsets = [
        gradient.storage_offset() - bucket.buffer().storage_offset()
        for gradient in bucket.gradients()
    ]
    return [
        flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)
        for parameter, offset in zip(bucket.parameters(), offsets, strict=True)
    ]


class ShardTree(GradientTree):
    """A tree over gradients of FSDP2 units, for a model sharded over the axis `shard` alone.

    `mesh` has this axis.

    Each of the `groups` of neighbouring shards runs whole nodes (`assign_in_groups`).
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, groups: int = 1) -> None:
        super().__init__(list(model.parameters()))
        self._groups = groups
        self.shards = mesh["shard"].get_group()
        self.replicas = mesh["replicate"].get_group()
        self._units = []
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                unit = _Unit(name, self)
                module.set_custom_reduce_scatter(unit)  # type: ignore[arg-type]
                module.set_all_reduce_hook(unit.all_reduce)
                self._units.append(unit)
        self.leaves: int = 0
        # the micro-batches that the shards of this replica run now; None: a dummy
        self.round: list[int | None] = []
        self.last = False
        self._rounds = 0

    def before(self, passing: MicroBatchPass) -> None:
        """Find which micro-batches the shards of this replica run in this round."""
        self.leaves = passing.micro_batches_per_step
        self.last = passing.last
        each = self.shards.size() // self._groups
        now = range(self._rounds * each, (self._rounds + 1) * each)
        of_groups = [leaves_of(nodes) for nodes in self._of_replica(self.replicas.rank())]
        self.round = [
            leaves[position] if position < len(leaves) else None
            for leaves in of_groups
            for position in now
        ]

    def after(self, passing: MicroBatchPass) -> None:
        """Leave the sums to the units' trees; refuse a step in which one of them misses leaves."""
        self._rounds = 0 if passing.last else self._rounds + 1
        if not passing.last:
            for parameter in self.parameters:
                parameter.grad = None  # held in the units' trees
            return
        for unit in self._units:
            if len(unit.partials):
                what = (
                    f"some parameters of {unit.name or 'the model'} are used in some micro-batches"
                    " only"
                )
                why = (
                    "FSDP2 reduces a unit in those backward passes that use it, so the sum would"
                    " miss leaves"
                )
                fix = "let every micro-batch use them, or use ddp with find_unused_parameters"
                raise UsageError(what, where="distributed.reproducible", why=why, fix=fix)

    def _of_replica(self, replica: int) -> Sequence[Sequence[Node]]:
        of_groups = tree_assignment(self.leaves, self.replicas.size() * self._groups)
        return of_groups[replica * self._groups : (replica + 1) * self._groups]

    def nodes(self) -> list[list[Node]]:
        """Return the nodes whose sums each replica has, by replica."""
        nodes_of_replicas = []
        for replica in range(self.replicas.size()):
            held = chain.from_iterable(self._of_replica(replica))
            nodes_of_replicas.append(nodes_that_cover(set(leaves_of(held)), self.leaves))
        return nodes_of_replicas


class _Unit(InNewBuffers):
    """One unit's reduce-scatter and all-reduce, as FSDP2 calls them."""

    def __init__(self, name: str, tree: ShardTree) -> None:
        self.name = name
        self.partials = Partials(0)
        self._tree = tree

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Exchange this round's leaves; in a step's last round, write the sum if it is complete."""
        self._add(list(torch.cat(list(AllToAll(input_tensor, group).received()), dim=1)))
        if self._tree.last and self._tree.replicas.size() == 1:
            output_tensor.copy_(self.partials.single())

    def all_reduce(self, reduced: Tensor) -> None:
        """Add the output of the reduce-scatter; in the last round write replicas' sum to it."""
        tree = self._tree
        # FSDP2 has not called the reduce-scatter, and the output is the leaf
        if tree.shards.size() == 1:
            self._add([reduced])
        if not tree.last:
            return
        if tree.replicas.size() > 1:
            nodes = tree.nodes()
            held = [self.partials.take(node) for node in nodes[tree.replicas.rank()]]
            sums = [None if values is None else values[0] for values in held]
            tree_all_reduce(sums, reduced, tree.leaves, tree.replicas, nodes)
        elif tree.shards.size() == 1:
            reduced.copy_(self.partials.single())

    def _add(self, leaves: list[Tensor]) -> None:
        if not len(self.partials):
            self.partials = Partials(self._tree.leaves)
        for index, leaf in zip(self._tree.round, leaves, strict=True):
            if index is not None:
                self.partials.add(index, [leaf], owned=False)
