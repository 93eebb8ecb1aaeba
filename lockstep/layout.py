"""Defines `Layout`: the number of ranks along each axis of the mesh. Does not import torch.

Tests: tests/process_group/test_mesh.py, tests/plan/test_layouts.py
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lockstep.errors import UsageError

# The axes whose sizes multiply to the number of ranks. A rank's neighbours are along the last one.
SIZED = ("pipeline", "replicate", "shard", "context", "tensor")
# Those along which ranks run the same micro-batches, each a part of them: the last ones.
SAME_BATCH = ("context", "tensor")
# axis → what it spreads over its ranks, of which each has a part, as a plural. `expert` divides the
# ranks that share out micro-batches.
SPREADS = {"context": "sequences", "tensor": "layers", "expert": "experts"}


@dataclass(frozen=True)
class Layout:
    """The distribution of micro-batches and parameters over ranks."""

    strategy: str = "single"  # its name, as in `distributed.strategy`
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    # of the ranks that share out micro-batches, neighbours that share out the experts of each layer
    expert: int = 1
    # number of models that train on their own between exchanges; 0: all ranks train one
    workers: int = 0
    # what was chosen for the user, logged at the start
    notice: str = field(default="", compare=False)
    topology: str = field(default="", compare=False)  # the layout as a topology (`hybrid:2x2`)

    @cached_property  # read in each step
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.pipeline * self.data_parallel_size * self.same_batch_size

    @property
    def sizes(self) -> dict[str, int]:
        """The axes along which there are several ranks, or experts are spread."""
        axes = dict.fromkeys((*SIZED, *SPREADS))
        return {axis: getattr(self, axis) for axis in axes if getattr(self, axis) > 1}

    @property
    def spreads(self) -> bool:
        """Return whether several ranks have a part each of sequences, layers or experts."""
        return any(getattr(self, axis) > 1 for axis in SPREADS)

    @cached_property  # read in each step
    def same_batch_size(self) -> int:
        """Number of ranks that work on the same micro-batches.

        Each works on its part of the sequences and layers.
        """
        return math.prod(getattr(self, axis) for axis in SAME_BATCH)

    def alone(self) -> "Layout":
        """Return the layout in which ranks that run the same micro-batches count as one."""
        one: dict[str, Any] = dict.fromkeys(SAME_BATCH, 1)
        return replace(self, **one)

    def strides(self) -> Iterator[tuple[str, int, int]]:
        """Yield the axes whose ranks run the same micro-batches, the nearest ranks first.

        They are (axis, ranks along it, how far each is from the next).
        """
        stride = 1
        for axis in reversed(SAME_BATCH):
            size = getattr(self, axis)
            yield axis, size, stride
            stride *= size

    @property
    def is_one_group(self) -> bool:
        """Return whether all ranks run each micro-batch together, every one a part of it."""
        return self.world_size == self.same_batch_size

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks (under a pipeline: pipelines) that share a step's micro-batches."""
        return self.replicate * self.shard

    @property
    def has_stages(self) -> bool:
        """Return whether a rank holds some stages of the model alone."""
        return self.pipeline > 1

    @property
    def shards_parameters(self) -> bool:
        """Return whether a rank holds a share of each parameter alone."""
        return self.shard > 1

    @property
    def cuts_sequences(self) -> bool:
        """Return whether a rank has a part of each sequence alone."""
        return self.context > 1

    @property
    def meets_in_passes(self) -> bool:
        """Return whether ranks gather parameters, or exchange rows of experts, in each pass."""
        return max(self.shard, self.expert) > 1

    def pieces_of(self, rank: int) -> tuple[int, int, int]:
        """Return a rank's stage, its share of parameters, and its part of layers.

        Ranks with equal ones hold the same pieces of tensors. Of 8 ranks of
        `pipeline:2*fsdp:2*tensor:2`, rank 5 has (1, 0, 1).
        """
        batch_rank, piece = divmod(rank, self.same_batch_size)
        stage = batch_rank // self.data_parallel_size
        return stage, batch_rank % self.shard, piece % self.tensor

    def with_few_replicas(self) -> "Layout":
        """Return the layout with as few replicas, of two or more, as the experts take."""
        counts = range(1, self.replicate + 1)
        few = next(n for n in counts if n * self.shard % self.expert == 0)
        return replace(self, replicate=max(few, min(self.replicate, 2 * few)))

    @property
    def batch_shares(self) -> int:
        """Number of equal parts of a step's samples: data-parallel ranks, or workers."""
        return self.workers or self.data_parallel_size

    def __str__(self) -> str:
        return self.topology or f"{self.strategy} on {self.world_size} ranks"


def layout_of_sizes(
    strategy: str, sizes: Mapping[str, int], world_size: int, given: Mapping[str, int | None]
) -> Layout:
    """Return the layout with these sizes.

    If their product is not the number of ranks, show the equation.
    """
    same_batch = {axis: given.get(axis) or 1 for axis in SAME_BATCH}
    along: dict[str, Any] = {axis: sizes.get(axis, 1) for axis in SIZED} | same_batch
    layout = replace(Layout(strategy), **along)
    if layout.world_size != world_size * layout.same_batch_size:
        equation = " × ".join(
            f"{axis} {size}" for axis, size in along.items() if size > 1 or axis not in same_batch
        )
        given_text = ", ".join(f"{axis}_size={n}" for axis, n in given.items() if n) or "no sizes"
        what = (
            f"{equation} = {layout.world_size} ranks, but {world_size * layout.same_batch_size}"
            " were started"
        )
        fix = f"start {layout.world_size} ranks, or let the sizes multiply to {world_size}"
        raise UsageError(
            what, where="distributed", why=f"strategy {strategy} with {given_text}", fix=fix
        )
    return layout
