"""Gathers a step's rows of queues, memory banks and counts (`distributed.buffers: gather`).

Rows come in the order of the samples.

Each micro-batch starts from the buffers that the step began with. What it wrote is found by
comparison with them:

    a queue    in a module with a pointer, a buffer of one whole number: the slots from where the
               pointer was to where the forward pass left it. All micro-batches' slots are laid one
               after the other, round the end, and the pointer stands behind the last one
    a bank     in a module without a pointer: the elements that differ, each at its own position.
               Two micro-batches can't write the same element: which one came last would be lost
    a count    a whole number that is not a queue's pointer: the sum of what micro-batches add to it

A queue of four slots, its pointer at 3, in a step of two micro-batches that write two slots each:
both write slots 3 and 0 of their own copy. Laid one after the other, the first has slots 3 and 0,
the second 1 and 2, and the pointer is at 3 again, as if they had run one after the other.

Tests: tests/parallel/forward_effects/test_buffers.py,
tests/parallel/forward_effects/test_combined_buffers.py, tests/parallel/test_worked_examples.py
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UsageError, listed
from lockstep.parallel.comm import all_gather_flat

KEY = "distributed.buffers"


@dataclass(frozen=True)
class BufferPlace:
    """A buffer of a model, by its canonical name and by where it is registered."""

    name: str
    module: nn.Module
    attribute: str

    @property
    def tensor(self) -> Tensor:
        """The tensor that is registered now."""
        return getattr(self.module, self.attribute)  # type: ignore[no-any-return]

    def put(self, tensor: Tensor) -> None:
        """Register another tensor."""
        setattr(self.module, self.attribute, tensor)


class _Written(NamedTuple):
    """The rows that one micro-batch has written."""

    ends: list[int]  # of each number, after the forward pass
    # of each queue: dim → [slots, …] along it, for each dim that the writes fit
    slots: list[dict[int, Tensor]]
    cells: list[tuple[Tensor, Tensor]]  # of each bank: positions and values, flat


def in_sample_order(
    rows: Mapping[int, Tensor],
    like: Tensor,
    micro_batches: int,
    group: dist.ProcessGroup | None,
    ranks: int,
) -> list[Tensor]:
    """Return the rows of each of a step's micro-batches, on all ranks; all of them call it.

    Args:
        rows: micro-batch → [rows, …], of those that this rank has run; without any where it has no
            rows.
        like: [rows, …] of the same dtype and shape but for the rows.
        micro_batches: the step's number of them, over all ranks.
        group: the ranks; None: all.
        ranks: their number.
    """
    none = like[:0]
    if ranks == 1:
        return [rows.get(index, none) for index in range(micro_batches)]
    table = torch.zeros(2, micro_batches, dtype=torch.int64)
    for index, own in rows.items():
        table[0, index] = len(own)
        table[1, index] = dist.get_rank(group)
    table = table.to(like.device)
    dist.all_reduce(table, group=group)  # each micro-batch is run by one rank, the others add zeros
    counts, owners = table.tolist()  # host waits for the device
    # An all-gather takes equal parts: each rank sends as many rows as the one that has most, as
    # bytes, so that rows of any type go the same way.
    total = [
        sum(c for c, owner in zip(counts, owners, strict=True) if owner == rank)
        for rank in range(ranks)
    ]
    width = like.new_empty(like.shape[1:]).numel() * like.element_size()
    most = max(total)
    mine = torch.zeros(most, width, dtype=torch.uint8, device=like.device)
    begin = 0
    for index in sorted(rows):
        if len(rows[index]):
            mine[begin : begin + len(rows[index])] = _bytes(rows[index])
        begin += len(rows[index])
    theirs = torch.empty(ranks * most * width, dtype=torch.uint8, device=like.device)
    all_gather_flat(theirs, mine.view(-1), group=group)
    theirs = theirs.view(ranks, most, width)
    of_micro_batches = []
    at = [0] * ranks
    for count, owner in zip(counts, owners, strict=True):
        piece = theirs[owner, at[owner] : at[owner] + count]
        of_micro_batches.append(
            piece.clone().view(like.dtype).view(count, *like.shape[1:]) if count else none
        )
        at[owner] += count
    return of_micro_batches


def _bytes(rows: Tensor) -> Tensor:
    """Return [rows, …] as [rows, bytes]."""
    return rows.contiguous().view(len(rows), -1).view(torch.uint8)


class GatheredRows:
    """The buffers of one model, or of a stage of it, whose rows are gathered."""

    def __init__(
        self, places: Sequence[BufferPlace], group: dist.ProcessGroup | None, ranks: int
    ) -> None:
        self._places = list(places)
        self._group = group
        self._ranks = ranks
        self._numbers = [place for place in self._places if _is_number(place.tensor)]
        self._queues: list[tuple[BufferPlace, BufferPlace]] = []  # with their pointers
        self._banks: list[BufferPlace] = []
        for place in self._places:
            if place in self._numbers:
                continue
            if place.tensor.numel() == 1:
                what = f"{KEY}: gather: {place.name} is one number, which has no rows"
                raise UsageError(what, where=KEY, fix=f"write {place.name}: mean, or rank0")
            pointer = self._pointer_of(place)
            if pointer is None:
                self._banks.append(place)
            else:
                self._queues.append((place, pointer))
        self._written: dict[int, _Written] = {}

    def _pointer_of(self, queue: BufferPlace) -> BufferPlace | None:
        """Return the number beside a queue that says where its next rows go, if there is one."""
        pointers = [number for number in self._numbers if number.module is queue.module]
        if len(pointers) > 1:
            pointers = [
                number for number in pointers if number.attribute.startswith(queue.attribute)
            ] or pointers
        if len(pointers) > 1:
            what = (
                f"{KEY}: gather: the pointer of {queue.name} may be"
                f" {listed([number.name for number in pointers])}"
            )
            fix = (
                f"name its pointer {queue.attribute}_ptr, and what is not a pointer otherwise; or"
                " give that another way"
            )
            raise UsageError(what, where=KEY, fix=fix)
        return pointers[0] if pointers else None

    @property
    def any(self) -> bool:
        """Return whether there is such a buffer."""
        return bool(self._places)

    def take(self, index: int, first: Mapping[str, Tensor]) -> None:
        """Take what a forward pass has written.

        `first`: the buffers that it began with, by name.
        """
        ends = [int(number.tensor) for number in self._numbers]  # host waits for the device
        slots = [
            slots_written(
                first[queue.name], queue.tensor, int(first[pointer.name]), int(pointer.tensor)
            )
            for queue, pointer in self._queues
        ]
        self._written[index] = _Written(
            ends, slots, [_cells(first[b.name], b.tensor) for b in self._banks]
        )

    def forget(self) -> None:
        """Forget what was taken in this step."""
        self._written.clear()

    def finish(self, micro_batches: int, first: Mapping[str, Tensor]) -> None:
        """Write all micro-batches' results to the buffers that the step began with."""
        counted = self._counted(micro_batches)
        numbers = {
            number.name: counted[:, column].tolist() for column, number in enumerate(self._numbers)
        }
        ends: dict[str, int] = {}  # of pointers
        column = len(self._numbers)
        for position, (queue, pointer) in enumerate(self._queues):
            buffer = first[queue.name]
            counts = counted[:, column : column + buffer.dim()] - 1  # -1: it does not fit
            column += buffer.dim()
            end = self._lay_slots(position, queue, buffer, int(first[pointer.name]), counts)
            if ends.setdefault(pointer.name, end) != end:
                what = (
                    f"{KEY}: gather: queues with the pointer {pointer.name} have unequal numbers of"
                    " slots or rows"
                )
                raise UsageError(what, where=KEY, fix=f"give {queue.name} a pointer of its own")
        for position, bank in enumerate(self._banks):
            self._merge(position, bank, first[bank.name], micro_batches)
        for name, after in numbers.items():
            start = int(first[name])
            if name not in ends and min(after) < start:
                what = f"{KEY}: gather: the forward pass takes {name} from {start} to {min(after)}"
                why = (
                    "it is not a queue's pointer in its module, so what each micro-batch adds to it"
                    " is added up"
                )
                raise UsageError(what, where=KEY, why=why, fix=f"write {name}: rank0, or mean")
            first[name].fill_(ends.get(name, start + sum(end - start for end in after)))
        self.forget()

    def _counted(self, micro_batches: int) -> Tensor:
        """Return [micro-batches, numbers]: where numbers ended.

        Then of each queue and dim, 1 + the slots written.
        """
        wide = len(self._numbers) + sum(queue.tensor.dim() for queue, _ in self._queues)
        device = self._places[0].tensor.device
        rows = {}
        for index, written in self._written.items():
            row = list(written.ends)
            for (queue, _), slots in zip(self._queues, written.slots, strict=True):
                row += [
                    1 + len(slots[dim]) if dim in slots else 0 for dim in range(queue.tensor.dim())
                ]
            rows[index] = torch.tensor([row], dtype=torch.int64, device=device)
        like = torch.empty(0, wide, dtype=torch.int64, device=device)
        return torch.cat(in_sample_order(rows, like, micro_batches, self._group, self._ranks)).cpu()

    def _lay_slots(
        self, position: int, queue: BufferPlace, buffer: Tensor, start: int, counts: Tensor
    ) -> int:
        """Lay the slots that micro-batches have written one after the other.

        Return where the pointer ends. `counts`: [micro-batches, dims], the slots that each has
        written along each dim.
        """
        fitting = [
            dim
            for dim, size in enumerate(buffer.shape)
            if size and bool((counts[:, dim] >= 0).all())
        ]
        if not fitting:
            what = (
                f"{KEY}: gather: the forward pass writes {queue.name} outside of the slots that its"
                " pointer passes"
            )
            why = (
                "a queue is written from where the pointer was to where it then stands, round"
                " the end"
            )
            fix = (
                "write it so; register a memory bank in a module without a pointer; or write"
                f" {queue.name}: mean, or rank0"
            )
            raise UsageError(what, where=KEY, why=why, fix=fix)
        totals = counts.sum(0).tolist()
        # others are written all over
        dim = min(fitting, key=lambda each: totals[each] / buffer.shape[each])
        rows = {index: written.slots[position][dim] for index, written in self._written.items()}
        like = buffer.movedim(dim, 0)
        laid = torch.cat(in_sample_order(rows, like, len(counts), self._group, self._ranks))
        size = len(like)
        total = len(laid)
        kept = min(size, total)  # of more, the last ones
        slots = torch.arange(start + total - kept, start + total, device=buffer.device) % size
        like[slots] = laid[total - kept :]
        return (start + total) % size

    def _merge(self, position: int, bank: BufferPlace, buffer: Tensor, micro_batches: int) -> None:
        """Write the elements that micro-batches have written, each of them one."""
        mine = {index: written.cells[position] for index, written in self._written.items()}
        flat = buffer.flatten()
        parts = [
            ({index: cells[each] for index, cells in mine.items()}, like)
            for each, like in enumerate((flat.new_empty(0, dtype=torch.int64), flat))
        ]
        positions, values = (
            torch.cat(in_sample_order(rows, like, micro_batches, self._group, self._ranks))
            for rows, like in parts
        )
        if len(torch.unique(positions)) < len(positions):
            what = (
                f"{KEY}: gather: two micro-batches of a step write the same elements of {bank.name}"
            )
            why = (
                "each starts from the buffers that the step began with, and its module has no"
                " pointer that is gathered, too"
            )
            fix = (
                "keep the position in a buffer of one whole number of the same module, and name"
                f" it, too: {bank.attribute}_ptr: gather; or write {bank.name}: mean, or rank0"
            )
            raise UsageError(what, where=KEY, why=why, fix=fix)
        flat[positions] = values
        buffer.copy_(flat.view_as(buffer))


def slots_written(before: Tensor, after: Tensor, start: int, end: int) -> dict[int, Tensor]:
    """Return dim → the slots [slots, …] along it from `start` to `end`, round the end.

    Dims are left out where anything outside of these slots differs.

    A pointer that is where it was has passed no slot if nothing differs, and else all of them.
    A queue of four slots whose pointer was at 3 and is at 1 has two new ones, 3 and 0:

    >>> before = torch.zeros(4, 2)
    >>> after = torch.tensor([[2.0, 2], [0, 0], [0, 0], [1, 1]])
    >>> slots_written(before, after, start=3, end=1)
    {0: tensor([[1., 1.],
            [2., 2.]])}
    """
    changed = differs(before, after)
    by_dim = {}
    anything = bool(changed.any())  # host waits for the device
    for dim, size in enumerate(before.shape):
        if not (0 <= start <= size and 0 <= end <= size and size):
            continue
        count = (end - start) % size or size * anything
        slots = (start + torch.arange(count, device=before.device)) % size
        outside = changed.movedim(dim, 0).reshape(size, -1).any(1)
        outside[slots] = False
        if not outside.any():
            by_dim[dim] = after.movedim(dim, 0)[slots]
    return by_dim


def _cells(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions and the values of the elements that differ, flat."""
    positions = differs(before, after).flatten().nonzero()[:, 0]
    return positions, after.flatten()[positions]


def differs(before: Tensor, after: Tensor) -> Tensor:
    """Return where elements differ; a nan is as another."""
    if before.is_floating_point() or before.is_complex():
        return (before != after) & ~(before.isnan() & after.isnan())
    return before != after


def _is_number(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and not (
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    )
