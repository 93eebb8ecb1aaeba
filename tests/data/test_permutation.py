"""The orders of an epoch: permutations that look random, and what making one costs."""

import doctest
import tracemalloc
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import lockstep.data.permutation as permutation
from lockstep.config import DataConfig
from lockstep.data import DistributedSampler, SampleOrder
from lockstep.data.permutation import (
    AHEAD,
    LARGEST_LIST,
    KeyedOrder,
    epoch_order,
    permuted,
    round_keys,
)
from tests.data.shared import adopt, everything, plain

SIZES = [*range(1, 20), 31, 32, 33, 1000, 4095, 4096, 4097]


def whole(size: int, seed: int = 1, epoch: int = 0) -> np.ndarray[Any, Any]:
    return permuted(np.arange(size), size, round_keys(seed, epoch))


def test_every_sample_comes_once() -> None:
    for size in SIZES:
        for epoch in range(2):
            assert sorted(whole(size, epoch=epoch)) == list(range(size))


@pytest.mark.parametrize("size", [2**31 + 11, 10**12])
def test_samples_of_a_large_set_differ(size: int) -> None:
    places = np.concatenate([np.arange(20_000), np.arange(size - 20_000, size)])
    found = permuted(places, size, round_keys(1, 0))
    assert len(set(found.tolist())) == len(places)
    assert 0 <= found.min() < size // 100
    assert size - size // 100 < found.max() < size


@pytest.mark.parametrize("size", [3, 8, 50])
def test_every_sample_is_as_likely_at_every_position(size: int) -> None:
    """Chi-square of (position, sample) over many epochs: 1 on average, with deviation √(2/df)."""
    epochs = 500
    counts = np.zeros((size, size))
    for epoch in range(epochs):
        counts[np.arange(size), whole(size, epoch=epoch)] += 1
    expected = epochs / size
    degrees = (size - 1) ** 2
    chi_square = ((counts - expected) ** 2 / expected).sum() / degrees
    assert abs(chi_square - 1) < 5 * (2 / degrees) ** 0.5


def test_all_orders_of_a_few_samples_are_as_likely() -> None:
    epochs = 1200
    counts = Counter(tuple(whole(4, epoch=epoch).tolist()) for epoch in range(epochs))
    expected = epochs / 24
    assert len(counts) == 24
    chi_square = sum((count - expected) ** 2 / expected for count in counts.values()) / 23
    assert chi_square < 1 + 5 * (2 / 23) ** 0.5


@pytest.mark.parametrize("size", [4096, 50_000])
def test_an_order_has_no_structure_that_can_be_seen(size: int) -> None:
    found = whole(size)
    differences = np.diff(found) % size
    # As in a random order: about one neighbour follows its neighbour, and differences repeat
    # rarely. With two rounds in place of eight 65 of 50,000 neighbours follow each other.
    assert (differences == 1).sum() <= 8
    assert len(np.unique(differences)) > 0.6 * size
    position = np.arange(size)
    assert abs(np.corrcoef(position, found)[0, 1]) < 4 / size**0.5
    for bit in range(size.bit_length() - 1):
        assert abs(np.corrcoef(position & 1, found >> bit & 1)[0, 1]) < 4 / size**0.5


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    first = whole(1000)
    for other in (whole(1000, seed=2), whole(1000, epoch=1)):
        assert (first == other).sum() < 10  # one, in a random order
    assert (first == whole(1000)).all()


def test_the_example_is_right() -> None:
    assert doctest.testmod(permutation).failed == 0


def test_the_keyed_order_of_a_seed_stays_what_it_is() -> None:
    """A run that is resumed with a newer version goes on through the same permutation."""
    assert whole(10).tolist() == [6, 3, 7, 4, 0, 8, 1, 2, 5, 9]
    assert permuted(np.arange(3), 10**9, round_keys(7, 2)).tolist() == [
        920435838,
        956597102,
        63514794,
    ]


def test_positions_are_answered_in_any_order() -> None:
    expected = whole(10_000, epoch=3).tolist()
    order = KeyedOrder(10_000, seed=1)
    for start, stop, step in [(0, 5, 1), (4090, 4100, 1), (9990, 10_000, 1), (3, 10_000, 7)]:
        assert order.samples(3, range(start, stop, step)) == expected[start:stop:step]
    assert order.samples(0, range(5)) == whole(10_000)[:5].tolist()
    assert order.samples(3, range(AHEAD + 100)) == expected[: AHEAD + 100]
    assert order.samples(3, range(5, 5)) == []


def counted(monkeypatch: pytest.MonkeyPatch, size: int, step: int) -> tuple[int, int]:
    """The numbers that the network permutes for a step, and the most bytes it takes."""
    numbers = 0
    network = permutation._network

    def counting(values: Any, bits: int, keys: list[int]) -> Any:
        nonlocal numbers
        numbers += len(values)
        return network(values, bits, keys)

    order = SampleOrder(size, 8, 64, seed=1, order="keyed")
    with monkeypatch.context() as patched:
        patched.setattr(permutation, "_network", counting)
        tracemalloc.start()
        order.samples_of(step)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return numbers, peak


def test_the_first_step_of_a_thousand_million_samples_costs_what_that_of_many_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counted(monkeypatch, 10_000, 0)  # what NumPy makes at its first use
    # 2^n, so that no number is permuted again: how often one is depends on the size alone.
    small = counted(monkeypatch, 2**14, 0)
    for size in (2**24, 2**30):
        large = counted(monkeypatch, size, 0)
        assert large[0] == small[0] == AHEAD
        assert large[1] < 1.1 * small[1]
    later = counted(monkeypatch, 10**9, 10_000_000)
    assert later[0] < 2 * AHEAD
    assert later[1] < 1.1 * counted(monkeypatch, 10_000, 0)[1]
    assert later[1] < 1_000_000


def test_the_list_is_made_for_few_samples_alone() -> None:
    assert epoch_order(LARGEST_LIST, 1).name == "randperm"
    assert epoch_order(LARGEST_LIST + 1, 1).name == "keyed"
    assert epoch_order(10, 1, order="keyed").name == "keyed"
    assert epoch_order(LARGEST_LIST + 1, 1, order="randperm").name == "randperm"
    assert epoch_order(LARGEST_LIST + 1, 1, shuffle=False).name == "given"


class Numbers:
    """A data set of numbers, of any size."""

    deterministic = True

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


LARGE = Numbers(LARGEST_LIST + 10)


def source(config: DataConfig | None = None, **options: Any) -> Any:
    return adopt(
        LARGE,
        config,
        batch_size=2,
        global_batch_size=4,
        assign=everything,
        stop_step=6,
        seed=1,
        device="cpu",
        **options,
    )


def test_a_resumed_run_goes_on_in_the_order_in_which_it_began() -> None:
    begun = source()
    steps = plain(list(begun))
    recorded = begun.state_dict()
    assert recorded == {"order": "keyed"}
    assert plain(list(source(start_step=2, state=recorded))) == steps[2:]
    # A checkpoint of a run that began with the list names nothing, however large the data are.
    by_list = source(DataConfig(order="randperm"))
    listed = plain(list(by_list))
    assert listed != steps
    assert by_list.state_dict() == {}
    assert plain(list(source(start_step=2, state={}))) == listed[2:]
    # What a config names counts.
    keyed = DataConfig(order="keyed")
    assert plain(list(source(keyed, start_step=2, state={}))) == steps[2:]


@pytest.mark.parametrize("order", ["keyed", "randperm"])
def test_the_sampler_of_ones_own_loop_has_the_same_order(order: str) -> None:
    size = 3 * AHEAD + 5
    whole_epoch = SampleOrder(size, 1, size, seed=3, order=order).samples_of(1)
    expected = [index for micro in whole_epoch.micro_batches for index in micro]
    for rank in range(3):
        sampler = DistributedSampler(size, 3, rank, seed=3, order=order)
        sampler.set_epoch(1)
        assert list(sampler) == expected[rank::3]


def test_orders_are_named() -> None:
    with pytest.raises(ValueError, match="keyed"):
        DataConfig(order="feistel")  # type: ignore[arg-type]
