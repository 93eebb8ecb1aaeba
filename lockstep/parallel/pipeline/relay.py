"""Forward passes alone, over all stages (for evaluation, sampling and to learn shapes), and the shapes of what is sent.

A receiver must know the shape of a tensor, and stages in the middle never see a batch. So each shape of batch gets a
*signature*, a number that the first stage sends to all others before a run, and a new one is sent through the stages
once. The signatures of all data-parallel ranks are gathered together: FSDP2's collectives need these ranks to do the
same things. Micro-batches of known shapes go through a window at a time, others one by one, a description before each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.pipeline.stage_module import StageModule
from lockstep.parallel.pipeline.stage_parameters import wait_for
from lockstep.parallel.pipeline.torch_stage import Meta, Metas
from lockstep.randomness import derive_key
from lockstep.torch_compat.pytree import tree_flatten, tree_leaves, tree_map

# (stage, place among the micro-batches): called before the stage's forward pass of this micro-batch
Start = Callable[[StageModule, int], None]


@dataclass
class Relay:
    """Forward passes that send tensors from stage to stage."""

    parts: Sequence[StageModule]  # this rank's stages, ascending
    rank_of: Sequence[int]  # of each stage of the pipeline, its pipeline rank
    group: dist.ProcessGroup  # the ranks of the pipeline
    device: torch.device
    objects_on: torch.device  # the device on which the group carries pickled objects

    def __post_init__(self) -> None:
        self._me = dist.get_rank(self.group)

    def _global(self, stage: int) -> int:
        return dist.get_global_rank(self.group, self.rank_of[stage])

    def _is_here(self, stage: int) -> bool:
        return self.rank_of[stage] == self._me

    def one(
        self, start: Start, place: int = 0, *, learn: Callable[[int, Metas, Metas], None] | None = None,
        to_last: bool = True,
    ) -> Any:  # fmt: skip
        """Run one micro-batch of any shape; return the last stage's result, None on ranks that do not hold it.

        `learn` is called with (stage, received, sent) descriptions; `to_last`: run the last stage, too.
        """
        result, kept = None, ()
        for part in self.parts:
            received, metas = self._receive(part, kept)
            if part.is_last:
                if learn is not None:  # before it runs: the ranks count these shapes as known, even if it fails
                    learn(part.index, metas, ())
                if to_last:
                    start(part, place)
                    result = part(*received)
                break
            start(part, place)
            outputs = part(*received)
            sent = tuple(map(Meta.of, outputs))
            if learn is not None:
                learn(part.index, metas, sent)
            if self._is_here(part.index + 1):
                kept = outputs
                continue
            target = self._global(part.index + 1)
            dist.send_object_list([sent], dst=target, group=self.group, device=self.objects_on)
            for output in outputs:
                dist.send(output.detach(), dst=target, group=self.group)
        return result

    def _receive(self, part: StageModule, kept: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Metas]:
        if part.is_first:
            return (), ()
        if self._is_here(part.index - 1):
            metas = tuple(map(Meta.of, kept))
            return tuple(t.detach().requires_grad_(m.requires_grad) for t, m in zip(kept, metas, strict=True)), metas
        source = self._global(part.index - 1)
        box: list[Any] = [None]
        dist.recv_object_list(box, src=source, group=self.group, device=self.objects_on)
        metas = box[0]
        tensors = tuple(meta.empty(self.device) for meta in metas)
        for tensor in tensors:
            dist.recv(tensor, src=source, group=self.group)
        return tuple(t.requires_grad_(m.requires_grad) for t, m in zip(tensors, metas, strict=True)), metas

    def many(self, start: Start, places: Sequence[int], shapes: Callable[[int, int], tuple[Metas, Metas]]) -> None:
        """Run micro-batches of known shapes, (place, stage) → (received, sent), a window at a time, on all stages."""
        window = dist.get_world_size(self.group)
        works: list[tuple[dist.Work | None, Tensor]] = []  # a tensor must be kept until it has been sent
        for begin in range(0, len(places), window):
            now = places[begin : begin + window]
            kept: dict[int, tuple[Tensor, ...]] = {}  # place → inputs of the next of this rank's stages
            for part in self.parts:
                arriving = {}
                if not part.is_first and not self._is_here(part.index - 1):
                    source = self._global(part.index - 1)
                    kept = {at: tuple(m.empty(self.device) for m in shapes(at, part.index)[0]) for at in now}
                    arriving = {at: [dist.irecv(t, src=source, group=self.group) for t in kept[at]] for at in now}
                for place in now:
                    wait_for(arriving.get(place, ()))
                    start(part, place)
                    outputs = part(*kept.pop(place, ()))
                    if part.is_last:
                        continue
                    if self._is_here(part.index + 1):
                        kept[place] = outputs
                    else:
                        target = self._global(part.index + 1)
                        works += [(dist.isend(out, dst=target, group=self.group), out) for out in outputs]
        wait_for([work for work, _ in works])

    def share_result(self, result: Any) -> Any:
        """Broadcast the last stage's result, and return it on all ranks of the pipeline."""
        source = self._global(len(self.rank_of) - 1)
        holds = self._is_here(len(self.rank_of) - 1)
        box: list[Any] = [None]
        if holds:
            box = [tree_map(lambda leaf: Meta.of(leaf) if isinstance(leaf, Tensor) else leaf, result)]
        dist.broadcast_object_list(box, src=source, group=self.group, device=self.objects_on)
        if not holds:
            result = tree_map(lambda leaf: leaf.empty(self.device) if isinstance(leaf, Meta) else leaf, box[0])
        result = tree_map(lambda leaf: leaf.contiguous() if isinstance(leaf, Tensor) else leaf, result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                dist.broadcast(leaf, src=source, group=self.group)
        return result


@dataclass(frozen=True)
class Agreement:
    """The signatures that the ranks exchanged before a run."""

    signatures: list[int]  # of each of this pipeline's micro-batches
    # Places in the run of micro-batches with signatures new to this pipeline, one for each signature; where pipelines
    # run together, all places if any pipeline has new ones.
    new: list[int]
    anyone: bool  # whether any pipeline has new ones


@dataclass
class Shapes:
    """The shapes that a rank's stages receive and send, by signature."""

    dp_rank: int  # which of the `dp_size` parallel pipelines this rank belongs to
    dp_size: int
    knows_batches: bool  # this rank has the first stage
    device: torch.device  # on which all ranks exchange small messages
    together: bool  # pipelines exchange rows of experts in each pass, so that all of them run the same number of passes
    _seen: set[tuple[int, int]] = field(default_factory=set)  # (dp_rank, signature)
    _metas: dict[tuple[int, int], tuple[Metas, Metas]] = field(default_factory=dict)  # (signature, stage) → in, out

    def agree(self, batches: Sequence[Any], *, training: bool) -> Agreement:
        """Exchange signatures; all ranks call it together, with the same number of micro-batches."""
        table = torch.zeros(self.dp_size, len(batches), dtype=torch.int64, device=self.device)
        if self.knows_batches:
            table[self.dp_rank] = torch.tensor([signature(batch, training) for batch in batches])
        dist.all_reduce(table)
        rows = table.tolist()  # the hosts agree here; no device is waited for where the CPU has a process group
        mine: list[int] = rows[self.dp_rank]
        known = {key for dp_rank, key in self._seen if dp_rank == self.dp_rank}
        new = [place for place, key in enumerate(mine) if key not in known and key not in mine[:place]]
        received = {(dp_rank, key) for dp_rank, keys in enumerate(rows) for key in keys}
        anyone = bool(received - self._seen)
        if anyone and self.together:
            new = list(range(len(mine)))
        self._seen |= received
        return Agreement(mine, new, anyone)

    def learn(self, key: int, stage: int, received: Metas, sent: Metas) -> None:
        self._metas[key, stage] = (received, sent)

    def of(self, key: int, stage: int) -> tuple[Metas, Metas]:
        return self._metas[key, stage]


def signature(batch: Any, training: bool) -> int:
    """Return a hash of the shapes and the plain values in a batch."""
    leaves, structure = tree_flatten(batch)
    return derive_key(training, str(structure), [_leaf(leaf) for leaf in leaves])


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), str(leaf.dtype)
    return leaf if isinstance(leaf, bool | int | float) else type(leaf).__name__
