"""The same bits under a pipeline: the sums of each stage, and their sum over parallel pipelines.

A stage's gradients of one micro-batch are a leaf of the tree. After the last backward pass an
all-to-all among the ranks with the same stages brings each its share of the nodes' sums, cut as the
parameters are. Weights that several stages use: one process adds up the gradient of a micro-batch
use by use, from the last segment to the first, so stages send the running sum with the gradient of
their input, and the stage with the first use has the leaf.

A table [4, 6] that the first stage looks up and the last one multiplies by, on two ranks: in the
backward pass of a micro-batch rank 1 makes g' [4, 6] and sends it with the gradient of its input;
rank 0 makes g and has the leaf g' + g, the order of one process.

Tests: tests/parallel/reproducible/test_tree.py, tests/parity/test_same_bits.py
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lockstep.data.batches import MicroBatch
from lockstep.division import ceil_div
from lockstep.parallel.comm import all_gather_flat
from lockstep.parallel.execution.transport import Meta, Metas
from lockstep.parallel.expert import PlacedExperts
from lockstep.parallel.pipeline.stage_parameters import StageParameters
from lockstep.parallel.reproducible.tree import (
    Partials,
    TreeReduceScatter,
    clear_zero_signs,
    tree_assignment,
)
from lockstep.parallel.strides import lay_gradients
from lockstep.tensors import local, local_chunk

_BUCKET = 25 << 20  # bytes of gradients that are sent at once
# parameters, with the sums of their gradients over each node
Bucket = Sequence[tuple[str, list[Tensor | None]]]


@dataclass(frozen=True)
class Uses:
    """The stages that use each trainable parameter of the whole model."""

    stages: Mapping[str, Sequence[int]]  # parameter → the stages that use it, ascending
    like: Mapping[str, Tensor]  # parameter that several stages use → its description, on meta
    rank_of: Sequence[int]  # of each stage, its pipeline rank

    def crossing(self, stage: int) -> list[str]:
        """Return the parameters that a stage up to `stage` uses and a later one, too."""
        return sorted(name for name, used in self.stages.items() if used[0] <= stage < used[-1])

    def of(self, stage: int) -> list[str]:
        return sorted(name for name, used in self.stages.items() if stage in used)


@dataclass
class StageTrees:
    """The sums of the gradients of one rank's stages."""

    held: StageParameters  # what the rank holds
    uses: Uses  # where the model's parameters are used
    stages: Sequence[int]  # of this rank
    device: torch.device  # of the gradients
    mesh: DeviceMesh  # with the axes `replicate` and `shard`
    # the ranks with the same stages; None where there is one pipeline
    dp_group: dist.ProcessGroup | None
    # parameter → group of this pipeline's ranks that hold it
    shared_groups: Mapping[str, dist.ProcessGroup]
    # those that the parallel pipelines share out, which have sums of their own
    experts: PlacedExperts | None = None
    run: Sequence[MicroBatch] = ()  # micro-batches of the schedule's run
    positions: range = range(0)  # of these in the step; without those that pad a run
    _partials: dict[int, Partials] = field(default_factory=dict)
    leaves: int = 0  # micro-batches in the step, over all ranks

    def __post_init__(self) -> None:
        self._replicas = self.mesh["replicate"]
        self._shards = self.mesh["shard"].size()
        # Of a stage: whose leaves are complete there.
        self._complete = {
            s: [n for n in self.uses.of(s) if self.uses.stages[n][0] == s] for s in self.stages
        }

    def begin_run(self, run: Sequence[MicroBatch], positions: range) -> None:
        """Begin a run of the schedule, with its micro-batches and their positions in the step."""
        self.run = run
        self.positions = positions

    def begin(self, leaves: int) -> None:
        self.leaves = leaves
        self._partials = {stage: Partials(leaves) for stage in self.stages}
        if self.experts is not None:
            self.experts.begin(leaves)

    # ---- what stages send: see `lockstep.parallel.execution.executor.Carrier` ----

    def metas(self, stage: int) -> Metas:
        """Describe the running sums of shared weights that later stages have used."""
        return tuple(
            Meta.of(self.uses.like[name]).as_gradient() for name in self.uses.crossing(stage)
        )

    def roots(self, stage: int, carried: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return (weight, running sum), from which the backward pass starts, too.

        So these sums precede the stage's own uses of the weights.
        """
        used_here = set(self.uses.of(stage))
        arrived = zip(self.uses.crossing(stage), carried, strict=True)
        return [(self._parameter(name), value) for name, value in arrived if name in used_here]

    def done(self, stage: int, position: int, carried: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Keep the gradients of a stage's weights as a leaf.

        Return the running sums for the previous stage.
        """
        sums: dict[str, Tensor | None] = dict(zip(self.uses.crossing(stage), carried, strict=True))
        for name in self.uses.of(stage):
            parameter = self._parameter(name)
            if parameter.grad is not None:
                sums[name] = parameter.grad
                parameter.grad = None
        micro_batch = self.run[position]
        if micro_batch.real:
            self._partials[stage].add(
                micro_batch.index, [sums.get(name) for name in self._complete[stage]]
            )
        if self.experts is not None:
            at = self.positions[position] if position < len(self.positions) else None
            self.experts.add_leaves(at, self._complete[stage])
        handed_on = [(name, sums.get(name)) for name in self.uses.crossing(stage - 1)]
        return tuple(
            self._zeros(name) if value is None else value.contiguous() for name, value in handed_on
        )

    def _zeros(self, name: str) -> Tensor:
        return torch.zeros_like(
            self.uses.like[name], device=self.device, memory_format=torch.contiguous_format
        )

    def _parameter(self, name: str) -> nn.Parameter:
        parameter = self.held.parameters[name][0].tensor()
        assert isinstance(parameter, nn.Parameter)
        return parameter

    # ---- the end of the step ----

    @torch.no_grad()
    def finish(self) -> None:
        """Write the sums to `.grad`, after the last backward pass.

        Parameters are then as the optimizer sees them.
        """
        if self.dp_group is None:
            for stage, names in self._complete.items():
                for name, total in zip(names, self._partials[stage].total() or [], strict=False):
                    self._parameter(name).grad = total
        else:
            self._sum_over_pipelines(self.dp_group)
        lay_gradients(self.held.named_parameters().values())
        for name, group in sorted(
            (n, g) for n, g in self.shared_groups.items() if n in self.uses.stages
        ):
            parameter = self._parameter(name)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            ranks = self.held.across[name]
            first = ranks.index(self.uses.rank_of[self.uses.stages[name][0]])
            dist.broadcast(
                local(parameter.grad), src=dist.get_global_rank(group, first), group=group
            )
        clear_zero_signs(
            [local(p.grad) for p in self.held.named_parameters().values() if p.grad is not None]
        )

    def _of_nodes(self, group: dist.ProcessGroup) -> Iterator[tuple[str, list[Tensor | None]]]:
        """Yield each parameter complete here, with its sums over the nodes of this pipeline."""
        nodes = tree_assignment(self.leaves, group.size())[group.rank()]
        for stage, names in self._complete.items():
            values = [self._partials[stage].take(node) for node in nodes]
            for index, name in enumerate(names):
                yield name, [None if value is None else value[index] for value in values]

    # ---- the sum over parallel pipelines, of all parameters that are complete on a rank ----

    def _sum_over_pipelines(self, group: dist.ProcessGroup) -> None:
        """Sum over pipelines bucket by bucket: one is sent while the next is filled."""
        sums = list(self._of_nodes(group))
        # A parameter that no micro-batch of any pipeline used stays without a gradient.
        seen = [any(value is not None for value in values) for _, values in sums]
        used = torch.tensor(seen, dtype=torch.uint8, device=self.device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        wanted = [item for item, was_used in zip(sums, used.tolist(), strict=True) if was_used]
        waiting: tuple[list[str], TreeReduceScatter] | None = None
        for bucket in _buckets(wanted, self.held):
            started = [name for name, _ in bucket], self._start(bucket, group)
            if waiting is not None:
                self._write(*waiting)
            waiting = started
        if waiting is not None:
            self._write(*waiting)

    def _start(self, bucket: Bucket, group: dist.ProcessGroup) -> TreeReduceScatter:
        """Start the exchange of a bucket: a row of all its parameters for each node of the tree."""
        like = torch.empty(0, device=self.device)
        widths = [self._width(name) for name, _ in bucket]
        nodes = range(len(bucket[0][1]))
        rows: list[Tensor | None] = []
        for node in nodes:
            of_parameters = zip(bucket, widths, strict=True)
            parts = [self._rows(name, sums[node], width) for (name, sums), width in of_parameters]
            rows.append(torch.cat(parts, 1))
        return TreeReduceScatter(rows, like, sum(widths), self.leaves, group)

    def _width(self, name: str) -> int:
        """Return the number of elements of a parameter that a rank gets.

        It is one replica's part of the largest shard. [5, 4] over 2 shards of dim 0 and 3 replicas:
        the largest shard has 3 rows, 12 elements, and a replica gets 4 of them.
        """
        shape, dim = self._sharding_of(name)
        rows = shape[dim] if shape else 1
        row_size = math.prod(shape) // max(1, rows)
        largest_shard = ceil_div(rows, self._shards) * row_size
        return ceil_div(largest_shard, self._replicas.size())

    def _rows(self, name: str, value: Tensor | None, width: int) -> Tensor:
        """Return a complete gradient as [ranks, width], with a row for each (replica, shard).

        Rows are in the order of the ranks.
        """
        _, dim = self._sharding_of(name)
        replicas = self._replicas.size()
        rows = torch.zeros(replicas, self._shards, width, device=self.device)
        if value is not None:
            for shard in range(self._shards):
                flat = local_chunk(value, dim, self._shards, shard).reshape(-1)
                rows[:, shard].copy_(
                    F.pad(flat, (0, replicas * width - flat.numel())).view(replicas, width)
                )
        return rows.view(-1, width)

    def _sharding_of(self, name: str) -> tuple[tuple[int, ...], int]:
        """Return a parameter's whole shape, and the dim along which it is sharded."""
        parameter = self.held.named_parameters()[name]
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        dims = [placement.dim for placement in placements if isinstance(placement, Shard)]
        return tuple(parameter.shape), dims[0] if dims else 0

    def _write(self, names: Sequence[str], reduce: TreeReduceScatter) -> None:
        """Wait for a bucket's sum, gather it over replicas, and write it to `.grad`."""
        mine = reduce.finish()
        replicas = self._replicas.size()
        gathered = mine.new_empty(replicas * mine.numel())
        if replicas > 1:
            all_gather_flat(gathered, mine, group=self._replicas.get_group())
        else:
            gathered = mine
        widths = [self._width(name) for name in names]
        for name, columns in zip(
            names, torch.split(gathered.view(replicas, -1), widths, dim=1), strict=True
        ):
            parameter = self.held.named_parameters()[name]
            piece = local(parameter)
            gradient = columns.reshape(-1)[: piece.numel()].view(piece.shape)
            if not isinstance(parameter, DTensor):
                parameter.grad = gradient
                continue

            parameter.grad = DTensor.from_local(
                gradient,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )


def _buckets(sums: Bucket, held: StageParameters) -> list[Bucket]:
    """Return runs of neighbours of about `_BUCKET` bytes.

    The same on every rank with the same stages.
    """
    parameters = held.named_parameters()
    starts = accumulate((parameters[name].numel() * 4 for name, _ in sums), initial=0)
    numbered = zip((start // _BUCKET for start in starts), sums, strict=False)
    return [[item for _, item in run] for _, run in groupby(numbered, key=lambda pair: pair[0])]
