"""The tree over micro-batches where a rank holds whole gradients: one process, and ddp.

After each backward pass the gradients become a leaf; under ddp, each bucket of the last one is folded with what is held
and sent while the backward pass goes on.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs lack it
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lockstep.data.batches import MicroBatch
from lockstep.parallel.micro_step import MicroBatchPass
from lockstep.parallel.placement import Tree
from lockstep.parallel.tree import Partials, finish, tree_assignment
from lockstep.parallel.tree_reduce import TreeAllReduce


class LocalTree(Tree):
    """Sums gradients of the micro-batches that this rank runs, and leaves the step's sum in `.grad`.

    A rank holds ⌈log₂ K⌉ + 1 copies of the gradients for K micro-batches of its own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._partials = Partials(0)

    def before(self, run: MicroBatchPass) -> None:
        if not len(self._partials):
            self._partials = Partials(run.micro_batches_per_step)

    def after(self, run: MicroBatchPass) -> None:
        if run.micro_batch.real:
            self._partials.add(run.micro_batch.index, [p.grad for p in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None
        if run.last:
            self._total()

    def _total(self) -> None:
        for parameter, total in zip(self._parameters, self._partials.total() or [], strict=False):
            parameter.grad = total

    def finish(self) -> None:
        """Finish the gradients after the last backward pass of a step."""
        finish([p.grad for p in self._parameters if p.grad is not None])


class ExchangedTree(LocalTree):
    """Sums gradients of the micro-batches that this rank runs, and once a step over replicas, in one exchange.

    Args:
        parameters: whole on every rank, the same ones in the same order.
        group: of the replicas.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        super().__init__(parameters)
        self._group = group

    def _total(self) -> None:
        leaves = self._partials.leaves
        nodes = tree_assignment(leaves, self._group.size())[self._group.rank()]
        held = [self._partials.take(node) for node in nodes]
        sums = [None if values is None else self._flat(values) for values in held]
        total = self._flat([None] * len(self._parameters))
        exchange = TreeAllReduce(sums, total, leaves, self._group)
        exchange.fold()
        exchange.finish(total)
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, piece in zip(self._parameters, torch.split(total, sizes), strict=True):
            parameter.grad = piece.view_as(parameter)

    def _flat(self, values: Sequence[Tensor | None]) -> Tensor:
        both = zip(self._parameters, values, strict=True)
        return torch.cat([torch.zeros_like(p).flatten() if v is None else v.flatten() for p, v in both])


class ReplicaTree(Tree):
    """The hook by which DDP reduces buckets up the tree.

    The all-to-all of a bucket starts when the bucket is ready; its fold and its all-gather follow when the next bucket
    is: one bucket behind, so that nothing waits for the network while there is backward work left to hide it.

    Args:
        model: its gradients must not be reduced in any other way.
        group: of the replicas.
    """

    def __init__(self, model: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._places = {id(p): place for place, p in enumerate(self._parameters)}
        self._group = group
        self._partials = Partials(0)
        self._micro_batch: MicroBatch | None = None
        self._may_miss = model.find_unused_parameters  # whether a backward pass may leave parameters out
        self._used_before: set[int] = set()  # places of those that earlier micro-batches of the step used
        self._folding: list[tuple[TreeAllReduce, Tensor]] = []  # the all-to-all runs
        self._gathering: list[tuple[TreeAllReduce, Tensor]] = []  # the all-gather runs
        model.register_comm_hook(None, self._reduce)

    def before(self, run: MicroBatchPass) -> None:
        if self._micro_batch is None:
            self._partials = Partials(run.micro_batches_per_step)
        self._micro_batch = run.micro_batch
        if run.last:
            # DDP remembers what earlier micro-batches of the step used, and wants a gradient of it to reduce.
            for place in self._used_before:
                self._parameters[place].grad = torch.zeros_like(self._parameters[place])
            self._used_before.clear()

    def after(self, run: MicroBatchPass) -> None:
        if run.last:
            assert not self._folding
            self._micro_batch = None
            return
        if run.micro_batch.real:
            self._partials.add(run.micro_batch.index, [p.grad for p in self._parameters])
        for place, parameter in enumerate(self._parameters):
            if parameter.grad is not None and self._may_miss:
                self._used_before.add(place)
            parameter.grad = None

    def finish(self) -> None:
        """Finish the gradients after the last backward pass of a step."""
        finish([p.grad for p in self._parameters if p.grad is not None])

    def _reduce(self, _state: None, bucket: GradBucket) -> Future[Tensor]:
        flat = bucket.buffer()
        sums = self._sums(bucket)
        if self._folding:
            behind, out = self._folding.pop()
            behind.fold()
            self._gathering.append((behind, out))
        self._folding.append((TreeAllReduce(sums, flat, self._partials.leaves, self._group), flat))
        if bucket.is_last():
            behind, out = self._folding.pop()
            behind.fold()
            for reduce, out_ in (*self._gathering, (behind, out)):
                reduce.finish(out_)
            self._gathering.clear()
        # DDP reads the result at the end of the backward pass: by then the last bucket has finished all of them.
        done: Future[Tensor] = Future()
        done.set_result(flat)
        return done

    def _sums(self, bucket: GradBucket) -> list[Tensor | None]:
        """This rank's nodes' sums of a bucket's parameters, each laid out as the bucket is."""
        assert self._micro_batch is not None
        partials = self._partials.move_out([self._places[id(p)] for p in bucket.parameters()])
        if self._micro_batch.real:
            partials.add(self._micro_batch.index, list(bucket.gradients()), owned=False)
        nodes = tree_assignment(partials.leaves, self._group.size())[self._group.rank()]
        return [None if (values := partials.take(node)) is None else _flat(values, bucket) for node in nodes]


def _flat(values: Sequence[Tensor | None], bucket: GradBucket) -> Tensor:
    like = bucket.buffer()
    flat = torch.zeros_like(like)
    for value, view in zip(values, bucket.gradients(), strict=True):
        if value is not None:
            place = view.storage_offset() - like.storage_offset()
            flat.as_strided(view.size(), view.stride(), place).copy_(value)
    return flat
