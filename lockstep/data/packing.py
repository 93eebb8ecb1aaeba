"""Decides which pieces of documents make which sequence, from the documents' lengths alone.

A document of n tokens takes n − 1 positions of a sequence: its inputs are all tokens but the last,
its targets all but the first. Laid end to end, documents of 4, 3 and 6 tokens take the positions
0–2, 3–4 and 5–9. With sequences of 5 positions there are two:

- `in_order` cuts the positions where a sequence ends: the first sequence is the first two
  documents, the second the third. Nothing is padded but the end of the last sequence, and nearly
  each sequence begins in the midst of a document.
- `first_fit` takes the positions of `FILLED` sequences at a time, and puts their documents, the
  longest first, each into the first of `WINDOW` sequences that has room for it. What finds no room
  is cut to fill the largest gaps. So 3 % are padded, and few documents are cut: of web pages one in
  3,000, and 2 of 68 where lengths are uniform from 1 to a sequence's, beside the one in which a
  window ends.

A document of more positions than a sequence is cut in any case. No target is lost where a document
is cut: the last target before a cut is the first token behind it.

An answer means nothing without its question, so conversations are never cut: `WholePlan` packs
them, too, and shortens those that are longer than a sequence.

Where a window begins follows from its number, and its documents are found in the sorted list of
their ends by bisection. So any sequence is found in as many reads as any other, and no plan is
written or kept.

    >>> plan = PackingPlan(np.array([4, 7, 13]), 5, "in_order")
    >>> plan.pieces(0)
    [Piece(document=0, token=0, length=3), Piece(document=1, token=4, length=2)]
    >>> plan.pieces(1)
    [Piece(document=2, token=7, length=5)]

Tests: tests/data/test_packing.py
"""

from bisect import bisect_left, bisect_right, insort
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lockstep.division import ceil_div

WINDOW = 32  # sequences whose documents are packed together
FILLED = 31  # sequences that these documents would fill; what is left is room to fit them
PACKINGS = ("first_fit", "in_order")
WHOLE_WINDOW = 1024  # documents that are packed together where none is cut
_MOST_KEPT = 64  # windows whose plans are kept, for their next sequence


class Ends(Protocol):
    """The ends of documents among their tokens, in order: an array, or a file read on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice, /) -> NDArray[Any]: ...


class Piece(NamedTuple):
    """A run of one document's positions within a sequence."""

    document: int
    token: int  # where its first input is among all tokens
    length: int  # in positions; it takes one more token, the last target


class PackingPlan:
    """The sequences of the documents `first` to `last` (unset: all) of a list.

    Args:
        ends: where each document of the list ends among its tokens.
        sequence_length: the positions of a sequence.
        packing: one of `PACKINGS`.
    """

    def __init__(
        self,
        ends: Ends,
        sequence_length: int,
        packing: str,
        first: int = 0,
        last: int | None = None,
    ) -> None:
        assert packing in PACKINGS
        self.sequence_length = sequence_length
        self._ends = ends
        self._first = first
        self._last = len(ends) if last is None else last
        self._window, filled = (WINDOW, FILLED) if packing == "first_fit" else (1, 1)
        self._positions = filled * sequence_length  # of a window
        self._begin = _position_of(ends, first)
        self.num_positions = _position_of(ends, self._last) - self._begin
        self._kept: dict[int, list[list[Piece]]] = {}

    def __len__(self) -> int:
        windows, rest = divmod(self.num_positions, self._positions)
        return windows * self._window + ceil_div(rest, self.sequence_length)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def pieces(self, sequence: int) -> list[Piece]:
        """Return what a sequence consists of, in order."""
        window, index = divmod(sequence, self._window)
        if window not in self._kept:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[window] = self._planned(window)
        return self._kept[window][index]

    def _planned(self, window: int) -> list[list[Piece]]:
        """Return the sequences of a window."""
        length = self.sequence_length
        start = window * self._positions
        stop = min(start + self._positions, self.num_positions)
        pieces = self._between(start, stop)
        if self._window == 1:
            return [pieces]
        short = [part for piece in pieces for part in _cut(piece, length)]
        is_full = stop - start == self._positions
        return first_fit(short, length, self._window if is_full else ceil_div(stop - start, length))

    def _between(self, start: int, stop: int) -> list[Piece]:
        """Return the documents at the positions `start` to `stop`, cut to these."""
        ends = self._ends
        documents = range(self._first, self._last)

        def containing(position: int) -> int:
            wanted = position + self._begin
            return self._first + bisect_right(
                documents, wanted, key=lambda document: _position_of(ends, document + 1)
            )

        begins_in = containing(start)
        ends_in = containing(stop - 1)
        stops = ends[begins_in : ends_in + 1].astype(np.int64)
        before = int(ends[begins_in - 1 : begins_in][0]) if begins_in else 0
        starts = np.concatenate([np.array([before]), stops[:-1]])
        numbers = np.arange(begins_in, ends_in + 1)
        from_position = starts - numbers - self._begin  # of each document's first input
        to_position = stops - numbers - 1 - self._begin
        skipped = np.maximum(start - from_position, 0)  # positions that are in another window
        lengths = np.minimum(to_position, stop) - from_position - skipped
        pieces = zip(numbers.tolist(), (starts + skipped).tolist(), lengths.tolist(), strict=True)
        # A document of one token has nothing to predict.
        return [Piece(*piece) for piece in pieces if piece[2] > 0]


class WholePlan:
    """The sequences of the documents `first` to `last` of a list, none of which is cut.

    Runs of `WHOLE_WINDOW` documents are packed together: the longest first, each into the fullest
    sequence that has room for it. All lengths are read once, to count the sequences of each run:
    some two seconds for a million documents. Where a document is longer than a sequence, what does
    not fit is left out, or all of it without `shortens`: `too_long` lists these documents. The last
    of these three has one position more than the sequence:

        >>> plan = WholePlan(np.array([4, 7, 14]), 5)
        >>> plan.pieces(0)
        [Piece(document=2, token=7, length=5)]
        >>> plan.pieces(1)
        [Piece(document=0, token=0, length=3), Piece(document=1, token=4, length=2)]
        >>> len(WholePlan(np.array([4, 7, 14]), 5, shortens=False))
        1
    """

    def __init__(
        self,
        ends: Ends,
        sequence_length: int,
        first: int = 0,
        last: int | None = None,
        *,
        shortens: bool = True,
    ) -> None:
        self.sequence_length = sequence_length
        self.shortens = shortens
        self._ends = ends
        self._first = first
        self._last = len(ends) if last is None else last
        self._kept: dict[int, list[list[Piece]]] = {}
        self.too_long: list[tuple[int, int]] = []  # begin and end among the tokens, of each
        self._counts = [0]  # sequences before each window
        for window in range(ceil_div(self._last - first, WHOLE_WINDOW)):
            begins, stops = self._bounds(window)
            lengths = stops - begins - 1
            for number in np.flatnonzero(lengths > sequence_length).tolist():
                self.too_long.append((int(begins[number]), int(stops[number])))
            count = len(_packed(self._fitted(lengths), sequence_length))
            self._counts.append(self._counts[-1] + count)

    def __len__(self) -> int:
        return self._counts[-1]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}

    def pieces(self, sequence: int) -> list[Piece]:
        """Return what a sequence consists of, in order."""
        window = bisect_right(self._counts, sequence) - 1
        if window not in self._kept:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            self._kept[window] = self._planned(window)
        return self._kept[window][sequence - self._counts[window]]

    def _planned(self, window: int) -> list[list[Piece]]:
        begins, stops = self._bounds(window)
        lengths = self._fitted(stops - begins - 1)
        tokens = begins.tolist()
        first = self._first + window * WHOLE_WINDOW
        return [
            [Piece(first + number, tokens[number], lengths[number]) for number in sequence]
            for sequence in _packed(lengths, self.sequence_length)
        ]

    def _fitted(self, lengths: NDArray[np.int64]) -> list[int]:
        """Return the positions of documents of these lengths that are used; 0: it is left out."""
        length = self.sequence_length
        kept = length if self.shortens else 0
        fitted: list[int] = np.where(lengths > length, kept, lengths).tolist()
        return fitted

    def _bounds(self, window: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where the documents of a window begin and end among the tokens."""
        first = self._first + window * WHOLE_WINDOW
        last = min(first + WHOLE_WINDOW, self._last)
        stops = self._ends[first:last].astype(np.int64)
        before = int(self._ends[first - 1 : first][0]) if first else 0
        return np.concatenate([np.array([before]), stops[:-1]]), stops


def _packed(lengths: list[int], length: int) -> list[list[int]]:
    """Return the documents of each sequence, by their numbers; those without positions in none.

    The longest comes first, and each goes into the sequence that it fills best.
    """
    packed: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room and number of each sequence that is not full, sorted
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        needed = lengths[number]
        if needed <= 0:  # a document of one token has nothing to predict
            break
        index = bisect_left(free, (needed, 0))
        if index == len(free):
            room = length
            sequence = len(packed)
            packed.append([])
        else:
            room, sequence = free.pop(index)
        packed[sequence].append(number)
        if room > needed:
            insort(free, (room - needed, sequence))
    return packed


def _position_of(ends: Ends, document: int) -> int:
    """Return the positions of all documents before one: of d documents, their tokens less d."""
    return int(ends[document - 1 : document][0]) - document if document else 0


def _cut(piece: Piece, length: int) -> list[Piece]:
    """Return a piece in parts of at most `length` positions."""
    document, token, positions = piece
    return [
        Piece(document, token + done, min(length, positions - done))
        for done in range(0, positions, length)
    ]


def first_fit(pieces: list[Piece], length: int, sequences: int) -> list[list[Piece]]:
    """Put pieces into sequences, the longest first, each into the first that has room for it.

    Pieces that find no room are cut, and fill the largest gaps. All of them together have to fit,
    and no sequence stays empty.
    """
    packed: list[list[Piece]] = [[] for _ in range(sequences)]
    room = [length] * sequences
    left_over: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        for number, free in enumerate(room):
            if free >= piece.length:
                packed[number].append(piece)
                room[number] -= piece.length
                break
        else:
            left_over.append(piece)

    gaps = iter(sorted(range(sequences), key=lambda number: -room[number]))
    number = next(gaps)
    for document, token, positions in left_over:
        while positions:
            while not room[number]:
                number = next(gaps)
            taken = min(room[number], positions)
            packed[number].append(Piece(document, token, taken))
            room[number] -= taken
            token += taken
            positions -= taken
    for empty in packed:
        if not empty:  # as where all pieces are as long as a sequence
            _share(max(packed, key=len), empty)
    return packed


def _share(full: list[Piece], empty: list[Piece]) -> None:
    """Move the last piece of a sequence to an empty one, or half of the only one."""
    document, token, positions = full.pop()
    kept = positions // 2 if not full else 0
    if kept:
        full.append(Piece(document, token, kept))
    empty.append(Piece(document, token + kept, positions - kept))
