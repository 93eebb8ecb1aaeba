"""Forward passes alone, over all stages: for evaluation, for samples from the model, and to learn shapes.

torch's schedules can run forward only, but not where stages are placed back and forth. This pass works for every
placement. Micro-batches whose shapes are known go through a window at a time, (window, stage, micro-batch) being the
order of all that is sent anywhere, so that no two ranks wait for each other. Others go one by one, a description ahead
of each tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.parallel.pipeline.part import StageModule
from lockstep.parallel.pipeline.torch_stage import Meta, Metas
from lockstep.torch_compat.pytree import tree_leaves, tree_map

Start = Callable[[StageModule, int], None]
"""(stage, place among the micro-batches): the stage's forward pass of this micro-batch begins."""


@dataclass
class Relay:
    """Passes tensors from stage to stage.

    Args:
        parts: this rank's stages, ascending.
        rank_of: of each stage of the pipeline, its pipeline rank.
        group: the ranks of the pipeline.
        objects_on: the device on which the group carries pickled objects.
    """

    parts: Sequence[StageModule]
    rank_of: Sequence[int]
    group: dist.ProcessGroup
    device: torch.device
    objects_on: torch.device

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
        """One micro-batch of any shape; returns what the last stage returns, None on ranks that do not hold it.

        Args:
            place: of the micro-batch, for `start`.
            learn: told (stage, what it receives, what it sends on).
            to_last: run the last stage, too.
        """
        result, kept = None, ()
        for part in self.parts:
            received, metas = self._receive(part, kept)
            if part.is_last:
                if learn is not None:  # before it runs: the ranks have agreed to know these shapes, even if it fails
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
            else:
                self._send(part.index, outputs, sent)
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

    def _send(self, stage: int, outputs: tuple[Tensor, ...], metas: Metas) -> None:
        target = self._global(stage + 1)
        dist.send_object_list([metas], dst=target, group=self.group, device=self.objects_on)
        for output in outputs:
            dist.send(output.detach(), dst=target, group=self.group)

    def many(self, start: Start, places: Sequence[int], shapes: Callable[[int, int], tuple[Metas, Metas]]) -> None:
        """Micro-batches of known shapes, a window at a time; the last stage keeps what it makes of them.

        Args:
            places: of the micro-batches, for `start`.
            shapes: (place, stage) → what the stage receives, what it sends on.
        """
        window = dist.get_world_size(self.group)
        works: list[tuple[dist.Work | None, Tensor]] = []  # what is under way must be kept until it has arrived
        for begin in range(0, len(places), window):
            now = places[begin : begin + window]
            kept: dict[int, tuple[Tensor, ...]] = {}
            for part in self.parts:
                arriving = self._arriving(part, now, shapes)
                for place in now:
                    inputs = arriving[place]() if arriving else kept.pop(place, ())
                    start(part, place)
                    outputs = part(*inputs)
                    if part.is_last:
                        continue
                    if self._is_here(part.index + 1):
                        kept[place] = outputs
                    else:
                        target = self._global(part.index + 1)
                        works += [(dist.isend(out, dst=target, group=self.group), out) for out in outputs]
        for work, _ in works:
            if work is not None:
                work.wait()

    def _arriving(
        self, part: StageModule, places: Sequence[int], shapes: Callable[[int, int], tuple[Metas, Metas]]
    ) -> dict[int, Callable[[], tuple[Tensor, ...]]]:
        """Place → waits for the tensors and returns them; empty for a stage that is sent nothing."""
        if part.is_first or self._is_here(part.index - 1):
            return {}
        source = self._global(part.index - 1)
        waits: dict[int, Callable[[], tuple[Tensor, ...]]] = {}
        for place in places:
            buffers = tuple(meta.empty(self.device) for meta in shapes(place, part.index)[0])
            works = [dist.irecv(buffer, src=source, group=self.group) for buffer in buffers]

            def wait(
                buffers: tuple[Tensor, ...] = buffers, works: Sequence[dist.Work | None] = tuple(works)
            ) -> tuple[Tensor, ...]:
                for work in works:
                    if work is not None:
                        work.wait()
                return buffers

            waits[place] = wait
        return waits

    def share_result(self, result: Any) -> Any:
        """What the last stage returned, on all ranks of the pipeline."""
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
