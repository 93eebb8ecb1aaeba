"""Mixtures: shares as weights say, each source gone through evenly, found at any position."""

from collections import Counter

import numpy as np
import pytest

from lockstep.data.mixing import WEIGHTED, MixedOrder, draws_by_weight

SIZES = [7, 400, 50]


def sources(samples: list[int]) -> list[int]:
    return (np.searchsorted(np.cumsum(SIZES), samples, side="right")).tolist()


def mixed(draws: list[int], num_samples: int, seed: int = 1) -> MixedOrder:
    return MixedOrder(SIZES, draws, num_samples, seed)


def test_a_block_has_the_draws_of_each_source() -> None:
    draws = draws_by_weight([0.5, 0.2, 0.3])
    order = mixed(draws, 3 * WEIGHTED)
    for block in range(3):
        found = order.samples(0, range(block * WEIGHTED, (block + 1) * WEIGHTED))
        assert [Counter(sources(found))[n] for n in range(3)] == draws == [5000, 2000, 3000]
    # Any part of a block is mixed, too.
    shares = Counter(sources(order.samples(0, range(500, 1500))))
    assert abs(shares[0] - 500) < 80


def test_each_source_is_gone_through_evenly_over_epochs() -> None:
    order = mixed(draws_by_weight([1, 3, 6]), num_samples=457)
    seen = Counter(sample for epoch in range(60) for sample in order.samples(epoch, range(457)))
    begins = [0, 7, 407]
    for begin, size in zip(begins, SIZES, strict=True):
        counts = [seen[begin + n] for n in range(size)]
        assert max(counts) - min(counts) <= 1, begin  # all passes but the last are complete


def test_passes_of_a_source_have_orders_of_their_own() -> None:
    order = mixed([10, 20, 30], num_samples=60)
    small = [
        sample for epoch in range(14) for sample in order.samples(epoch, range(60)) if sample < 7
    ]
    passes = [tuple(small[n : n + 7]) for n in range(0, 140, 7)]
    assert all(sorted(each) == list(range(7)) for each in passes)
    assert len(set(passes)) > 15
    assert order.samples(0, range(60)) != order.samples(1, range(60))
    assert order.samples(0, range(60)) != mixed([10, 20, 30], 60, seed=2).samples(0, range(60))


def test_epochs_take_each_source_as_often_as_they_say() -> None:
    order = mixed([14, 400, 25], num_samples=439)  # 2, 1 and half an epoch
    first = Counter(order.samples(0, range(439)))
    assert [first[n] for n in range(7)] == [2] * 7
    assert all(first[7 + n] == 1 for n in range(400))
    both = first + Counter(order.samples(1, range(439)))
    assert all(both[407 + n] == 1 for n in range(50))


def test_a_position_depends_on_nothing_that_was_asked_before() -> None:
    used = mixed([4000, 4000, 2000], num_samples=100_000)
    for epoch, start in [(0, 5), (7, 99_990), (3, 0), (0, 9_995)]:
        fresh = mixed([4000, 4000, 2000], num_samples=100_000)
        positions = range(start, start + 10)
        assert fresh.samples(epoch, positions) == used.samples(epoch, positions)


@pytest.mark.parametrize(
    ("weights", "draws"),
    [
        ([1], [10_000]),
        ([1, 1, 1], [3334, 3333, 3333]),
        ([0, 2, 2], [0, 5000, 5000]),
        ([1e-9, 1, 0], [1, 9999, 0]),
        ([70, 20, 10], [7000, 2000, 1000]),
    ],
)
def test_weights_are_shares(weights, draws):
    assert draws_by_weight(weights) == draws
