"""Orders the samples of an epoch, from (seed, epoch) alone.

`keyed` is a permutation that is computed position by position and needs no memory: a Feistel
network with cycle walking. `randperm` is torch's list of all samples, 8 bytes each, which each rank
makes before the first step of an epoch: it takes 3.8 s and 0.8 GB for 1e8 samples. Runs keep the
order with which they began, so both stay (`data.order`).

A Feistel network permutes the numbers of a few bits: it cuts a number into two halves, and each
round swaps them and changes one by a function of the other and of a key. Whatever that function is,
a round can be undone, so no two numbers get the same place. For 6 samples the numbers have 3 bits,
and may become 6 or 7, which are not samples: these are permuted again until they are below 6 (cycle
walking; with at most twice as many numbers as samples, once on average).

    >>> [int(sample) for sample in permuted(np.arange(6), 6, round_keys(seed=1, epoch=0))]
    [3, 1, 4, 2, 5, 0]

Source: J. Black and P. Rogaway, *Ciphers with Arbitrary Finite Domains*, CT-RSA 2002.

Tests: tests/data/test_permutation.py
"""

from abc import ABC, abstractmethod
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.randomness import derive_key

ROUNDS = 8  # an even number, after which the halves have their first sizes again
AHEAD = 4096  # samples that are permuted at once, which takes about as long as permuting one
LARGEST_LIST = 1 << 16  # samples in the longest list that is made where `data.order` is `auto`


class EpochOrder(Protocol):
    """The order of an epoch's samples."""

    name: str  # as a checkpoint records it
    num_samples: int  # of an epoch

    def samples(self, epoch: int, positions: range) -> list[int]:
        """Return the samples at some positions of an epoch."""


class GivenOrder:
    """The order of the data themselves."""

    name = "given"

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def samples(self, epoch: int, positions: range) -> list[int]:
        return list(positions)


class ListedOrder:
    """Another order in each epoch, of which the current one is kept as a list."""

    name = "randperm"

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self._seed = seed
        self._epoch: int | None = None  # whose list it is
        self._list: NDArray[np.int64]

    def samples(self, epoch: int, positions: range) -> list[int]:
        if self._epoch != epoch:
            # A NumPy array is sliced in a third of the time.
            self._list = epoch_permutation(self.num_samples, self._seed, epoch).numpy()
            self._epoch = epoch
        samples: list[int] = self._list[positions.start : positions.stop : positions.step].tolist()
        return samples


class ComputedOrder(ABC):
    """An order whose samples are computed where they are asked for, some ahead.

    Without memory of its own: what is kept are `AHEAD` samples.
    """

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples  # of an epoch
        self._epoch: int | None = None  # whose samples are kept
        self._kept = range(0)  # positions whose samples are kept
        self._samples: list[int] = []

    @abstractmethod
    def computed(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at some positions of an epoch."""

    def samples(self, epoch: int, positions: range) -> list[int]:
        """Return the samples at some positions, computed now or with those before them."""
        start = positions.start
        stop = positions.stop
        if positions.step != 1:
            return self._list(epoch, positions)
        if epoch != self._epoch or not self._kept.start <= start <= stop <= self._kept.stop:
            self._epoch = epoch
            self._kept = range(start, max(stop, min(self.num_samples, start + AHEAD)))
            self._samples = self._list(epoch, self._kept)
        return self._samples[start - self._kept.start : stop - self._kept.start]

    def _list(self, epoch: int, positions: range) -> list[int]:
        numbers = np.arange(positions.start, positions.stop, positions.step)
        samples: list[int] = self.computed(epoch, numbers).tolist()
        return samples


class KeyedOrder(ComputedOrder):
    """Another order in each epoch, without a list of it."""

    name = "keyed"

    def __init__(self, num_samples: int, seed: int) -> None:
        super().__init__(num_samples)
        self._seed = seed

    def computed(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return permuted(positions, self.num_samples, round_keys(self._seed, epoch))


def epoch_order(
    num_samples: int, seed: int, *, shuffle: bool = True, order: str = "auto"
) -> EpochOrder:
    """Return the order that `data.shuffle` and `data.order` name."""
    if not shuffle:
        return GivenOrder(num_samples)
    if order == "auto":
        order = "keyed" if num_samples > LARGEST_LIST else "randperm"
    return KeyedOrder(num_samples, seed) if order == "keyed" else ListedOrder(num_samples, seed)


def epoch_permutation(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """Return the order `randperm` of an epoch, a permutation of 0 … num_samples − 1.

    It is int64 [num_samples], and follows from (seed, epoch).
    """
    generator = torch.Generator().manual_seed(derive_key("order of samples", seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def round_keys(seed: int, epoch: int, *further: object) -> list[int]:
    """Return a key for each round of a permutation."""
    return [derive_key("keyed order", seed, epoch, number, *further) for number in range(ROUNDS)]


def permuted(positions: NDArray[np.int64], size: int, keys: list[int]) -> NDArray[np.int64]:
    """Return the numbers at some positions of a keyed permutation of 0 … size − 1.

    Each position is from 0 to below `size`.

    The network permutes a power of two: 0 … 15 for a size of 11. A number from 11 on is permuted
    again, until it is below: no two positions come to one number, since none leaves its cycle.
    """
    bits = max(2, (size - 1).bit_length())
    numbers = _network(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(numbers >= size)
    while len(outside):
        numbers[outside] = _network(numbers[outside], bits, keys)
        outside = outside[numbers[outside] >= size]
    return numbers.astype(np.int64)


def _network(numbers: NDArray[np.uint64], bits: int, keys: list[int]) -> NDArray[np.uint64]:
    """Permute numbers of `bits` bits."""
    left_bits = bits // 2
    right_bits = bits - left_bits
    left = numbers >> np.uint64(right_bits)
    right = numbers & _ones(right_bits)
    for key in keys:
        left, right = right, left ^ (_mixed(right, key) & _ones(left_bits))
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint64(right_bits)) | right


def _ones(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)


def _mixed(numbers: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """Return 64 bits that each depend on all bits of a number and on the key.

    It is the finaliser of SplitMix64 (G. Steele, D. Lea and C. Flood, *Fast Splittable Pseudorandom
    Number Generators*, OOPSLA 2014). Products leave out what exceeds 64 bits.
    """
    z = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
