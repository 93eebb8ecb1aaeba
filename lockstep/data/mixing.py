"""Mixes sources: which sample of which source comes at which position of a run.

A run is divided into blocks, in each of which every source has a fixed number of draws, and a keyed
permutation of the block says which position draws from which source. So a source's draws before a
block are known without counting them. They go through the source again and again, each time in
another order. Two sources of 3 and 100 samples, with draws of 7 and 3 in blocks of 10: block 2 has
the draws 14 to 20 of the first source, from the last of its fifth pass to the last of its seventh.

Within a block of few draws a source's draws are taken in turn, so that no pass begins before the
one before it has ended; such a block is listed. In a block that is an epoch of all sources, each
with its own number of passes, these passes are mixed, and nothing is listed.

Tests: tests/data/test_mixing.py
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lockstep.data.permutation import LARGEST_LIST, ComputedOrder, permuted, round_keys

WEIGHTED = 10_000  # draws in a block of weighted sources, and so the precision of a weight


class MixedOrder(ComputedOrder):
    """The order of samples over sources that lie one after another in a data set.

    Args:
        sizes: the samples of each source.
        draws: how many of a block's draws are from each.
        num_samples: those of an epoch. Blocks and passes go on from one epoch to the next.
    """

    name = "mixed"

    def __init__(
        self, sizes: Sequence[int], draws: Sequence[int], num_samples: int, seed: int
    ) -> None:
        super().__init__(num_samples)
        self._sizes = list(sizes)
        self._firsts = np.cumsum([0, *sizes])[:-1].tolist()
        self._draws = list(draws)
        self._bounds = np.cumsum([0, *draws])
        self._block_size = int(self._bounds[-1])
        self._seed = seed
        self._listed_block: int | None = None
        self._listed: NDArray[np.int64]  # the draw at each offset of that block

    def computed(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples at some positions of an epoch, as indices of the data set.

        With draws of 7 and 3 in blocks of 10, position 23 of epoch 0 is offset 3 of block 2.
        If the block's permutation puts draw 8 there, it is of the second source, whose draws are 7
        to 9 of a block: its draw 2 · 3 + 8 − 7 = 7, counted over all blocks.
        """
        blocks, offsets = np.divmod(positions + epoch * self.num_samples, self._block_size)
        for block in np.unique(blocks).tolist():
            in_block = blocks == block
            offsets[in_block] = self._permuted(block, offsets[in_block])
        sources = np.searchsorted(self._bounds, offsets, side="right") - 1

        samples = np.empty_like(positions)
        for source in np.unique(sources).tolist():
            of_source = sources == source
            draws = blocks[of_source] * self._draws[source]
            draws += offsets[of_source] - self._bounds[source]
            samples[of_source] = self._firsts[source] + self._drawn(source, draws)
        return samples

    def _permuted(self, block: int, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the draw of the block at each offset; draws of a source are neighbours."""
        size = self._block_size
        keys = round_keys(self._seed, block, "block of sources")
        if size > LARGEST_LIST:
            return permuted(offsets, size, keys)
        if self._listed_block != block:
            draws = permuted(np.arange(size), size, keys)
            sources = np.searchsorted(self._bounds, draws, side="right") - 1
            # The offsets at which each source is drawn from, in order, get its draws in order.
            by_source = np.argsort(sources, kind="stable")
            self._listed = np.empty(size, np.int64)
            self._listed[by_source] = np.arange(size)
            self._listed_block = block
        return self._listed[offsets]

    def _drawn(self, source: int, draws: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples that a source gives for some of its draws, counted from 0."""
        size = self._sizes[source]
        passes, positions = np.divmod(draws, size)
        for number in np.unique(passes).tolist():
            in_pass = passes == number
            keys = round_keys(self._seed, number, "source", source)
            positions[in_pass] = permuted(positions[in_pass], size, keys)
        return positions


def draws_by_weight(weights: Sequence[float]) -> list[int]:
    """Return the draws of each source in a block of `WEIGHTED`, by largest remainders.

    Each source with a weight above 0 has at least one.
    """
    exact = [weight / sum(weights) * WEIGHTED for weight in weights]
    draws = [int(share) if share >= 1 or share == 0 else 1 for share in exact]
    by_remainder = sorted(
        range(len(exact)), key=lambda source: (draws[source] - exact[source], source)
    )
    missing = WEIGHTED - sum(draws)
    for source in by_remainder[: max(missing, 0)]:
        draws[source] += 1
    return draws
