"""What a script reads by itself, without a loader: positions in data, and numbers made to tensors.

A loop may take its samples from an array that all ranks hold, each from places of its own, or keep
what it has seen and take some of that. One process for each rank, which draws what the rank drew,
is given the rank's places, too. Two ranks that take windows of an array in turns:

    rank 0: tokens[0:32], tokens[64:96] …    rank 1: tokens[32:64], tokens[96:128] …
    one process for rank 1, as it is written: tokens[0:32], tokens[32:64] …
                            as it is given:   tokens[32:64], tokens[96:128] …

It is given places alone, and reads its own data there: what a rank makes of its data otherwise
differs. Inputs and targets that a rank takes from places of their own are not given, else the
targets of another sample would pass.

Tests: tests/verify/test_reads.py, tests/verify/test_script.py
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.failures.failure import short_path
from lockstep.verify.script.observed.draws import BatchKey

_MOST_BYTES = 1 << 24  # of one value that is kept
_MOST = 200_000  # reads that are kept
_INDEX = "[]"

Place = tuple[BatchKey, str, str, int]
"""The pass before which it is read, its line, the operation, and how often it was called there."""


@dataclass(frozen=True)
class LoopRead:
    """Places of data that a line of a script has read, or numbers that it made a tensor of."""

    place: Place
    rows: int = 0  # of the data
    index: Any = None  # whole numbers and slices; None: of a tensor that was made
    value: Tensor | None = None  # that was made; None: it is too large

    @property
    def line(self) -> str:
        """The script's own line."""
        return self.place[1]


Reads = Mapping[Place, LoopRead]


class ObservedReads:
    """Notes what a script reads, and gives it the places of another run.

    Args:
        given: what is read in place of what the script says.
        number: returns the number of the pass.
        is_reading: returns whether the loop itself reads, and no module, pass or loader.
        is_own: returns whether a file is the script's own.
        note: is given each read.
    """

    def __init__(
        self,
        given: Reads,
        number: Callable[[], int],
        is_reading: Callable[[], bool],
        is_own: Callable[[str], bool],
        note: Callable[[LoopRead], None],
    ) -> None:
        self._given = given
        self._number = number
        self._is_reading = is_reading
        self._is_own = is_own
        self._note = note
        self._noted = 0
        self._counts: Counter[tuple[BatchKey, str, str]] = Counter()

    def indexed(self, data: Any, index: Any) -> Any:
        """Return the index with which data are read: the script's own, or the one that is given."""
        if isinstance(index, Tensor) or not is_plain(index) or not self._is_reading():
            return index
        if isinstance(data, Tensor) and (data.requires_grad or not data.ndim):
            return index
        place = self._place(_INDEX)
        if place is None:
            return index
        rows = len(data)
        known = self._given.get(place)
        if known is not None and known.rows == rows and known.index is not None:
            index = known.index
        self._keep(LoopRead(place, rows, index))
        return index

    def made(self, name: str, value: Any) -> Any:
        """Return a tensor that was made of numbers: the script's own, or the one that is given."""
        if not isinstance(value, Tensor) or value.numel() < 2 or not self._is_reading():
            return value
        place = self._place(name)
        if place is None:
            return value
        known = self._given.get(place)
        if known is not None and known.value is not None and not _equal(known.value, value):
            value = known.value.to(value.device, value.dtype)
        kept = value.numel() * value.element_size() <= _MOST_BYTES
        copy = value.detach().cpu().clone() if kept else None
        self._keep(LoopRead(place, value.shape[0] if value.ndim else 0, value=copy))
        return value

    def _place(self, name: str) -> Place | None:
        """Return the place of a read; None if the script's own code does not ask for it."""
        frame = sys._getframe(3)  # of what called torch's function
        file = frame.f_code.co_filename
        if not self._is_own(file):
            return None
        batch = (-1, self._number())
        line = f"{short_path(file)}:{frame.f_lineno}"
        number = self._counts[batch, line, name]
        self._counts[batch, line, name] += 1
        return batch, line, name, number

    def _keep(self, read: LoopRead) -> None:
        if self._noted < _MOST:
            self._noted += 1
            self._note(read)


def is_plain(index: Any) -> bool:
    """Return whether an index is made of whole numbers and slices of them, and chooses something.

    Positions in a tensor come from what was drawn or read before.
    """
    parts = index if isinstance(index, tuple) else (index,)
    chooses = False
    for part in parts:
        if isinstance(part, slice):
            numbers = [each for each in (part.start, part.stop, part.step) if each is not None]
            if not all(_is_whole(each) for each in numbers):
                return False
            chooses |= bool(numbers)
        elif _is_whole(part):
            chooses = True
        elif part is not None and part is not Ellipsis:
            return False
    return chooses


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _equal(mine: Tensor, other: Tensor) -> bool:
    return mine.shape == other.shape and torch.equal(mine, other.detach().cpu().to(mine.dtype))


def reads_to_give(
    ranks: Sequence[Sequence[LoopRead]], written: Sequence[LoopRead]
) -> list[dict[Place, LoopRead]]:
    """Return, for each rank, what one process is given of its reads.

    Args:
        ranks: what each rank read.
        written: what one process reads as the script is written.
    """
    own = {read.place: read for read in written}
    varying = _varying_places(ranks)
    given = []
    for reads in ranks:
        of_rank = {
            read.place: read
            for read in reads
            if read.value is not None and read.place[1:] in varying
        }
        of_rank.update((read.place, read) for read in _moved_alike(reads, own))
        given.append(of_rank)
    return given


def _varying_places(ranks: Sequence[Sequence[LoopRead]]) -> set[tuple[str, str, int]]:
    """Return where tensors are made that differ from rank to rank, and from pass to pass.

    Others are settings, as weights of classes, which a rank may have wrong.
    """
    values: dict[tuple[str, str, int], list[list[Tensor]]] = defaultdict(
        lambda: [[] for _ in ranks]
    )
    for rank, reads in enumerate(ranks):
        for read in reads:
            if read.value is not None:
                values[read.place[1:]][rank].append(read.value)
    return {
        place
        for place, of_ranks in values.items()
        if all(len(each) > 1 and not _equal(each[0], each[1]) for each in of_ranks)
        and all(not _equal(each[0], of_ranks[0][0]) for each in of_ranks[1:])
    }


def _moved_alike(reads: Sequence[LoopRead], own: Reads) -> list[LoopRead]:
    """Return the reads at places for which one process, as it is written, has others.

    All that are read of data of one length before a pass have to be moved alike: a rank that moves
    its targets, and not its inputs, reads those of other samples.
    """
    moves: dict[tuple[BatchKey, int], set[Any]] = defaultdict(set)
    for read in reads:
        right = own.get(read.place)
        if read.index is not None and right is not None and right.index is not None:
            moves[read.place[0], read.rows].add(_move(read.index, right.index))
    return [
        read
        for read in reads
        if read.index is not None and len(moves[read.place[0], read.rows]) < 2
    ]


def _move(index: Any, right: Any) -> Any:
    """Return by how far an index is moved, and the step between its rows where that is another."""
    mine = index[0] if isinstance(index, tuple) else index
    other = right[0] if isinstance(right, tuple) else right
    if isinstance(mine, slice) and isinstance(other, slice):
        begins = (mine.start or 0) - (other.start or 0)
        steps = None if (mine.step or 1) == (other.step or 1) else mine.step or 1
        return int(begins), steps
    if _is_whole(mine) and _is_whole(other):
        return int(mine) - int(other), None
    return (0, None) if mine == other else (mine, other)
