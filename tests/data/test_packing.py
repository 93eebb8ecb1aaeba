"""Packing: every position of every document once, found in as many reads wherever it is."""

import doctest
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep.data.packing as packing
from lockstep.data.packing import (
    FILLED,
    PACKINGS,
    WINDOW,
    PackingPlan,
    Piece,
    WholePlan,
    first_fit,
)

lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def ends(lengths: Any) -> np.ndarray[Any, Any]:
    return np.cumsum(lengths)


@settings(max_examples=60, deadline=None)
@given(lengths_of_documents, st.integers(2, 12), st.sampled_from(PACKINGS), st.data())
def test_every_target_is_in_one_sequence(lengths, length, kind, data):
    first = data.draw(st.integers(0, len(lengths)))
    last = data.draw(st.integers(first, len(lengths)))
    plan = PackingPlan(ends(lengths), length, kind, first, last)
    positions = sum(lengths[first:last]) - (last - first)
    windows, rest = divmod(positions, FILLED * length)
    sequences = windows * WINDOW + -(-rest // length)
    assert len(plan) == (sequences if kind == "first_fit" else -(-positions // length))
    begins = ends([0, *lengths])
    found = set()
    for number in range(len(plan)):
        pieces = plan.pieces(number)
        total = sum(piece.length for piece in pieces)
        assert total == length or kind == "first_fit" or number == len(plan) - 1
        assert 0 < total <= length
        for document, token, count in pieces:
            assert begins[document] <= token < token + count < begins[document + 1]
            inputs = set(range(token, token + count))
            assert not found & inputs
            found |= inputs
    expected = {
        token
        for document in range(first, last)
        for token in range(begins[document], begins[document + 1] - 1)
    }
    assert found == expected


@settings(max_examples=60, deadline=None)
@given(lengths_of_documents, st.integers(2, 12), st.integers(1, 9), st.data())
def test_whole_documents_are_in_one_sequence_each(lengths, length, window, data):
    first = data.draw(st.integers(0, len(lengths)))
    last = data.draw(st.integers(first, len(lengths)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WHOLE_WINDOW", window)
        plan = pickle.loads(pickle.dumps(WholePlan(ends(lengths), length, first, last)))
        found = [piece for number in range(len(plan)) for piece in plan.pieces(number)]
        again = [plan.pieces(number) for number in reversed(range(len(plan)))]
    begins = ends([0, *lengths])
    expected = {
        Piece(document, begins[document], min(lengths[document] - 1, length))
        for document in range(first, last)
        if lengths[document] > 1
    }
    assert len(found) == len(expected)
    assert set(found) == expected
    assert all(0 < sum(piece.length for piece in pieces) <= length for pieces in again)
    long = [d for d in range(first, last) if lengths[d] - 1 > length]
    assert plan.too_long == [(begins[d], begins[d + 1]) for d in long]


def test_whole_documents_leave_little_room() -> None:
    lengths = np.random.default_rng(0).integers(2, 100, 4000)
    plan = WholePlan(ends(lengths), 256)
    assert len(plan) * 256 < 1.01 * (lengths - 1).sum()


@pytest.mark.parametrize("lengths", [[4000], [17] * 300, [16] * 300, [2] * 4000])
def test_no_sequence_is_empty(lengths: list[int]) -> None:
    """A step of empty sequences alone would have no target."""
    plan = PackingPlan(ends(lengths), 16, "first_fit")
    assert len(plan) >= 2 * WINDOW
    assert all(plan.pieces(number) for number in range(len(plan)))


def test_little_is_padded() -> None:
    lengths = np.random.default_rng(0).integers(2, 300, 2000)
    plan = PackingPlan(ends(lengths), 128, "first_fit")
    assert len(plan) > 5 * WINDOW
    assert len(plan) * 128 < 1.033 * plan.num_positions


def test_first_fit_cuts_fewer_documents_than_the_ends_of_sequences_do() -> None:
    lengths = np.random.default_rng(0).integers(2, 129, 4000)
    cuts = {}
    for kind in PACKINGS:
        plan = PackingPlan(ends(lengths), 128, kind)
        pieces = sum(len(plan.pieces(n)) for n in range(len(plan)))
        cuts[kind] = pieces - len(lengths)
    assert cuts["in_order"] > 0.9 * len(plan)
    assert cuts["first_fit"] < 0.12 * len(plan)


def test_longest_first_into_the_first_with_room() -> None:
    pieces = [Piece(0, 0, 3), Piece(1, 4, 5), Piece(2, 10, 2), Piece(3, 13, 4), Piece(4, 18, 6)]
    assert first_fit(pieces, 10, 2) == [
        [Piece(4, 18, 6), Piece(3, 13, 4)],
        [Piece(1, 4, 5), Piece(0, 0, 3), Piece(2, 10, 2)],
    ]
    # Nothing has room for the third: it fills the gaps, the larger first.
    assert first_fit([Piece(0, 0, 8), Piece(1, 9, 7), Piece(2, 17, 4)], 10, 2) == [
        [Piece(0, 0, 8), Piece(2, 20, 1)],
        [Piece(1, 9, 7), Piece(2, 17, 3)],
    ]


def test_a_sequence_depends_on_nothing_that_was_asked_before() -> None:
    lengths = np.random.default_rng(1).integers(1, 50, 3000)
    used = PackingPlan(ends(lengths), 16, "first_fit")
    for number in [0, 900, 33, 2000, 899, 0]:
        fresh = pickle.loads(pickle.dumps(used))
        assert fresh.pieces(number) == used.pieces(number)


class CountedEnds:
    """Ends of 2^30 documents of 11 tokens each, that count how often they are read."""

    def __init__(self) -> None:
        self.reads = 0
        self.numbers = 0

    def __len__(self) -> int:
        return 2**30

    def __getitem__(self, where: slice) -> np.ndarray[Any, Any]:
        found = np.arange(where.start, where.stop)
        self.reads += 1
        self.numbers += len(found)
        return (found + 1) * 11


@pytest.mark.parametrize("kind", PACKINGS)
def test_a_late_sequence_takes_as_many_reads_as_an_early_one(kind: str) -> None:
    counts = {}
    for number in (10, 1_000_000, 6_000_000):
        counted = CountedEnds()
        plan = PackingPlan(counted, 50, kind)
        counted.reads = 0
        counted.numbers = 0
        plan.pieces(number * WINDOW)
        counts[number] = (counted.reads, counted.numbers)
    reads = [found for found, _ in counts.values()]
    numbers = [found for _, found in counts.values()]
    assert max(reads) <= 2 * 31 + 2  # two bisections of 2^30, and the documents between them
    assert max(reads) - min(reads) <= 2
    assert max(numbers) - min(numbers) <= 8


def test_the_examples_are_right() -> None:
    assert doctest.testmod(packing).failed == 0
