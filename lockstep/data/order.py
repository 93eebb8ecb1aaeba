"""The order of samples: which samples make up which step, as a pure function of (seed, step).

An epoch's order is one permutation, from (seed, epoch). A step takes the next `global_batch_size` samples of it, cut
into micro-batches of `batch_size` consecutive samples. Ranks and workers do not appear here: they share the
micro-batches out, and so never change what a step is. Steps never straddle epochs; the last step of an epoch is short,
unless `drop_last`, which says how much it drops.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.errors import UsageError
from lockstep.randomness import derive_key


@dataclass(frozen=True)
class Window:
    """The samples of one step, as dataset indices, in micro-batches."""

    step: int
    epoch: int
    micro_batches: list[list[int]]
    last_of_epoch: bool

    @property
    def num_samples(self) -> int:
        """In the step, over all ranks."""
        return sum(len(indices) for indices in self.micro_batches)


class Order(Protocol):
    """What a `StepLoader` needs to know about an order of samples."""

    @property
    def steps_per_epoch(self) -> int | None: ...  # None: unknown before the epoch ends

    def window(self, step: int) -> Window: ...


def check_batch_sizes(batch_size: int, global_batch_size: int) -> None:
    """Whether a global batch can be cut into whole micro-batches.

    Raises:
        UsageError: it can't; the message shows the equation.
    """
    for name, value in (("batch_size", batch_size), ("global_batch_size", global_batch_size)):
        if value < 1:
            raise UsageError(
                f"{name} should be at least 1, but is {value}", where=f"training.{name}", why="a step needs samples"
            )
    whole, rest = divmod(global_batch_size, batch_size)
    if rest:
        near = sorted({max(1, whole) * batch_size, (whole + 1) * batch_size})
        raise UsageError(
            f"global_batch_size {global_batch_size} is not a multiple of batch_size {batch_size}: "
            f"{global_batch_size} = {whole} × {batch_size} + {rest}",
            where="training.global_batch_size",
            why="a step is made of whole micro-batches of batch_size samples",
            fix=f"set global_batch_size to {' or '.join(map(str, near))}, or batch_size to a number that divides it",
        )


def cut(samples: Sequence[int], batch_size: int) -> list[list[int]]:
    """Consecutive pieces of `batch_size`; the last may be shorter."""
    return [list(samples[i : i + batch_size]) for i in range(0, len(samples), batch_size)]


class SampleOrder:
    """The order over a dataset whose length is known.

    Args:
        num_samples: length of the dataset.
        batch_size: samples in a micro-batch.
        global_batch_size: samples in a step, over all ranks; a multiple of `batch_size`.
        seed: of the run.
        shuffle: each epoch in an order of its own; else always 0, 1, 2 …
        drop_last: leave out the incomplete step at the end of each epoch (`dropped_per_epoch` samples).

    Raises:
        UsageError: sizes that do not multiply out, an empty dataset, or one of which nothing would be left.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        global_batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        check_batch_sizes(batch_size, global_batch_size)
        if num_samples < 1:
            raise UsageError(
                "the dataset is empty: there is nothing to train on",
                where="data",
                fix="check what it reads: its __len__ is 0",
            )
        self.dropped_per_epoch = num_samples % global_batch_size if drop_last else 0
        if self.dropped_per_epoch == num_samples:
            raise UsageError(
                f"drop_last drops every step: {num_samples} samples are fewer than a global batch of "
                f"{global_batch_size}",
                where="data.drop_last",
                fix="leave drop_last off (the short step is weighted by what it holds), or lower global_batch_size",
            )
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._kept = num_samples - self.dropped_per_epoch
        self._cached: tuple[int, NDArray[np.int64]] | None = None  # the current epoch's permutation only

    @property
    def steps_per_epoch(self) -> int:
        """The short one at the end counts, if it is not dropped."""
        return -(-self._kept // self.global_batch_size)

    @property
    def notice(self) -> str | None:
        """What `drop_last` leaves out, to be said at start; None when nothing is."""
        if not self.dropped_per_epoch:
            return None
        return f"drop_last leaves out {self.dropped_per_epoch} of {self.num_samples} samples in each epoch" + (
            " (other ones each time)" if self.shuffle else " (always the last ones)"
        )

    def window(self, step: int) -> Window:
        """The samples of `step` (counted from 0 over all epochs)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.global_batch_size
        stop = min(start + self.global_batch_size, self._kept)
        samples = self._permutation(epoch)[start:stop].tolist() if self.shuffle else range(start, stop)
        return Window(step, epoch, cut(samples, self.batch_size), last_of_epoch=stop == self._kept)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._cached is None or self._cached[0] != epoch:
            # As an array of NumPy's: a piece of it is had in a third of the time.
            self._cached = (epoch, epoch_permutation(self.num_samples, self.seed, epoch).numpy())
        return self._cached[1]


def epoch_permutation(num_samples: int, seed: int, epoch: int) -> torch.Tensor:
    """The order of an epoch: a permutation of 0 … num_samples − 1, int64 [num_samples], from (seed, epoch)."""
    generator = torch.Generator().manual_seed(derive_key("order of samples", seed, epoch))
    return torch.randperm(num_samples, generator=generator)
