"""The tree over micro-batches under FSDP2, whose units reduce-scatter each micro-batch's gradient while backward runs.

In round k of a step, the shards of a replica run S neighbouring micro-batches of it. Here the reduce-scatter is an
all-to-all, which brings a rank its shard of these S leaves in as many bytes, and the rank adds them up the tree: it
holds ⌈log₂ M⌉ + 1 copies of its shard at most. In the last round the sum becomes the unit's gradient; replicas add up
theirs first. FSDP2 knows of no replicas here: it is given the shard axis alone, since its own all-reduce over replicas
can't be replaced, but a hook after the reduce-scatter can take its place.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lockstep.errors import UsageError
from lockstep.parallel.fsdp_gloo import AllToAll
from lockstep.parallel.micro_step import MicroBatchPass
from lockstep.parallel.parallel_model import local
from lockstep.parallel.placement import Tree
from lockstep.parallel.tree import Partials, finish, leaves_of, tree_assignment
from lockstep.parallel.tree_reduce import tree_all_reduce


class ShardTree(Tree):
    """Sums gradients of FSDP2 units up the tree.

    Args:
        model: sharded over the axis `shard` of `mesh` alone.
        mesh: with the axes `replicate` and `shard`.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = model
        self.shards, self.replicas = mesh["shard"].get_group(), mesh["replicate"].get_group()
        self._units = []
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                unit = _Unit(name, self)
                module.set_custom_reduce_scatter(unit)  # type: ignore[arg-type]
                module.set_all_reduce_hook(unit.all_reduce)
                self._units.append(unit)
        self.leaves: int = 0
        self.round: list[int] = []  # the micro-batches that the shards of this replica run now
        self.last = False
        self._rounds = 0

    def before(self, run: MicroBatchPass) -> None:
        self.leaves, self.last = run.micro_batches_per_step, run.last
        mine = leaves_of(self.nodes)
        shards = self.shards.size()
        self.round = mine[self._rounds * shards : (self._rounds + 1) * shards]

    def after(self, run: MicroBatchPass) -> None:
        self._rounds = 0 if run.last else self._rounds + 1
        if run.last:
            self._check()
        else:
            for parameter in self._model.parameters():
                parameter.grad = None  # held in the units' trees

    @property
    def nodes(self) -> Sequence[tuple[int, int]]:
        """What this rank's replica runs in the step."""
        return tree_assignment(self.leaves, self.replicas.size())[self.replicas.rank()]

    def finish(self) -> None:
        """After the last backward pass of a step."""
        finish([local(p.grad) for p in self._model.parameters() if p.grad is not None])

    def _check(self) -> None:
        for unit in self._units:
            if len(unit.partials):
                raise UsageError(
                    f"some parameters of {unit.name or 'the model'} are used in some micro-batches only",
                    where="distributed.reproducible",
                    why="FSDP2 reduces a unit in those backward passes that use it, so the sum would miss leaves",
                    fix="let every micro-batch use them, or use ddp with find_unused_parameters",
                )


class _Unit:
    """One unit's reduce-scatter and all-reduce, as FSDP2 calls them."""

    def __init__(self, name: str, tree: ShardTree) -> None:
        self.name = name
        self.partials = Partials(0)
        self._tree = tree

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        self._add(list(torch.cat(list(AllToAll(input_tensor, group).received()), dim=1)))
        if self._tree.last and self._tree.replicas.size() == 1:
            self._write(output_tensor)

    def all_reduce(self, reduced: Tensor) -> None:
        """After the reduce-scatter, on its output."""
        tree = self._tree
        if tree.shards.size() == 1:  # FSDP2 has not called the reduce-scatter, and the output is the leaf
            self._add([reduced])
        if not tree.last:
            return
        if tree.replicas.size() > 1:
            sums = [None if (v := self.partials.take(node)) is None else v[0] for node in tree.nodes]
            tree_all_reduce(sums, reduced, tree.leaves, tree.replicas)
        elif tree.shards.size() == 1:
            self._write(reduced)

    def _add(self, leaves: list[Tensor]) -> None:
        if not len(self.partials):
            self.partials = Partials(self._tree.leaves)
        for index, leaf in zip(self._tree.round, leaves, strict=False):  # behind the round's end: dummies
            self.partials.add(index, [leaf], owned=False)

    def _write(self, output: Tensor) -> None:
        total = self.partials.total()
        assert total is not None
        assert total[0] is not None
        output.copy_(total[0])
