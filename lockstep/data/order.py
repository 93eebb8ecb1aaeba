"""Defines which samples make up which step, as a pure function of (seed, step).

An epoch's order is one permutation, from (seed, epoch): see `permutation`. A step takes the next
`global_batch_size` samples of it, cut into micro-batches; ranks and workers only divide these among
themselves. Steps do not cross epochs. Python's, NumPy's and torch's global generators are seeded
before each sample is read (`lockstep.randomness`; `generators`: those of the dataset's own, too).

Tests: tests/data/test_order.py, tests/parity/test_law_one.py
"""

import operator
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.utils.data import Sampler

from lockstep.data.batches import known_length
from lockstep.data.generators import Generator, generators_of, restore, states_of
from lockstep.data.permutation import AHEAD, EpochOrder, epoch_order
from lockstep.division import ceil_div
from lockstep.errors import UsageError
from lockstep.machine.environment import rank_facts
from lockstep.randomness import preserve_states, seed_from, set_states, states


def set_epoch(holder: Any, epoch: int) -> bool:
    """Call `holder.set_epoch(epoch)` if there is such a method, and return whether there is."""
    if not hasattr(holder, "set_epoch"):
        return False
    holder.set_epoch(epoch)
    return True


@dataclass(frozen=True)
class StepSamples:
    """The samples of one step, as dataset indices, in micro-batches."""

    step: int
    epoch: int
    micro_batches: list[list[int]]
    last_of_epoch: bool

    @property
    def num_samples(self) -> int:  # in the step, over all ranks
        return sum(len(indices) for indices in self.micro_batches)


def check_batch_sizes(batch_size: int, global_batch_size: int) -> None:
    """Check that a global batch consists of complete micro-batches.

    A UsageError with the equation is raised if it does not.
    """
    whole, rest = divmod(global_batch_size, batch_size)
    if rest:
        near = sorted({max(1, whole) * batch_size, (whole + 1) * batch_size})
        what = (
            f"global_batch_size {global_batch_size} is not a multiple of batch_size {batch_size}:"
            f" {global_batch_size} = {whole} × {batch_size} + {rest}"
        )
        why = "a step is made of whole micro-batches of batch_size samples"
        fix = (
            f"set global_batch_size to {' or '.join(map(str, near))}, or batch_size to a number"
            " that divides it"
        )
        raise UsageError(what, where="training.global_batch_size", why=why, fix=fix)


class SampleOrder:
    """The order of samples over a dataset whose length is known.

    A UsageError is raised for sizes that leave nothing.

    With `shuffle` it is another one in each epoch, else always 0, 1, 2 …; `order` names which
    (`lockstep.data.permutation`), or is one. `drop_last` leaves out the incomplete step at the end
    of each epoch (`dropped_per_epoch` samples).
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
        order: str | EpochOrder = "auto",
    ) -> None:
        check_batch_sizes(batch_size, global_batch_size)
        if num_samples < 1:
            what = "the dataset is empty: there is nothing to train on"
            raise UsageError(what, where="data", fix="check what it reads: its __len__ is 0")
        self.dropped_per_epoch = num_samples % global_batch_size if drop_last else 0
        if self.dropped_per_epoch == num_samples:
            what = (
                f"drop_last drops every step: {num_samples} samples are fewer than a global batch"
                f" of {global_batch_size}"
            )
            fix = (
                "leave drop_last off (the short step is weighted by what it holds), or lower"
                " global_batch_size"
            )
            raise UsageError(what, where="data.drop_last", fix=fix)
        self.num_samples = num_samples
        self.batch_size = batch_size
        self.global_batch_size = global_batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.epochs = (
            epoch_order(num_samples, seed, shuffle=shuffle, order=order)
            if isinstance(order, str)
            else order
        )
        self._used_samples = num_samples - self.dropped_per_epoch

    @property
    def steps_per_epoch(self) -> int:
        return ceil_div(self._used_samples, self.global_batch_size)

    @property
    def notice(self) -> str | None:
        """A line to log at the start if `drop_last` leaves out samples."""
        if not self.dropped_per_epoch:
            return None
        dropped = "other ones each time" if self.shuffle else "always the last ones"
        return (
            f"drop_last leaves out {self.dropped_per_epoch} of {self.num_samples} samples in each"
            f" epoch ({dropped})"
        )

    def samples_of(self, step: int) -> StepSamples:
        """Return the samples of `step` (counted from 0 over all epochs)."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.global_batch_size
        stop = min(start + self.global_batch_size, self._used_samples)
        samples = self.epochs.samples(epoch, range(start, stop))
        size = self.batch_size
        micro_batches = [samples[i : i + size] for i in range(0, len(samples), size)]
        return StepSamples(step, epoch, micro_batches, last_of_epoch=stop == self._used_samples)


class SamplerOrder:
    """The order of samples that a user's batch sampler gives.

    A step takes its next `micro_batches` lists of indices.

    Every rank goes through the whole sampler, with generators seeded by (seed, epoch): that is
    cheap, since it yields indices, not data. A resumed run fast-forwards. Each epoch iterates it
    again, after `set_epoch(epoch)` if it, or the sampler within it, has that method; a UsageError
    is raised if it yields nothing.
    """

    def __init__(self, batch_sampler: Iterable[Any], micro_batches: int, *, seed: int) -> None:
        assert micro_batches >= 1
        self._sampler = batch_sampler
        self._micro_batches = micro_batches
        self._seed = seed
        self._own_generators = generators_of(batch_sampler)
        self._own_at_begin = _states_at_begin(batch_sampler, self._own_generators)
        self._latest: StepSamples | None = None
        self._generators: Any = None  # their states, as the sampler left them
        self._iterator: Iterator[Any] | None = None  # None: the next step begins an epoch
        # one list ahead, to detect the end of an epoch in time
        self._ahead: list[int] | None = None
        self._rewind()

    @property
    def sampler(self) -> Any:
        """The user's sampler, or the batch sampler."""
        return getattr(self._sampler, "sampler", self._sampler)

    @property
    def steps_per_epoch(self) -> int | None:
        count = known_length(self._sampler)
        return None if count is None else ceil_div(count, self._micro_batches)

    def samples_of(self, step: int) -> StepSamples:
        """Return the samples of a step, for which the sampler is iterated up to there."""
        if self._latest is not None and self._latest.step == step:
            return self._latest
        if step < self._next_step:
            self._rewind()
        with preserve_states():
            if self._generators is not None:
                set_states(self._generators)
            while self._next_step <= step:
                self._latest = self._take()
            self._generators = states()
        assert self._latest is not None
        return self._latest

    def _rewind(self) -> None:
        """Go back to before the first step."""
        self._next_step = 0
        self._epoch = -1
        self._latest = None
        self._generators = None
        self._iterator = None
        self._ahead = None
        restore(self._own_generators, self._own_at_begin)

    def _take(self) -> StepSamples:
        """Take the next step's batches from the sampler, which begins anew after its last."""
        if self._iterator is None:
            self._epoch += 1
            seed_from("sampler", self._seed, self._epoch)
            for holder in (self._sampler, getattr(self._sampler, "sampler", None)):
                set_epoch(holder, self._epoch)
            self._iterator = iter(self._sampler)
            self._ahead = self._pull()
            if self._ahead is None:
                what = (
                    f"the sampler {type(self._sampler).__name__} yields nothing in epoch"
                    f" {self._epoch}"
                )
                fix = "give a sampler that can be iterated more than once" if self._epoch else None
                raise UsageError(
                    what, why="each epoch iterates it anew" if self._epoch else None, fix=fix
                )
        micro_batches: list[list[int]] = []
        while self._ahead is not None and len(micro_batches) < self._micro_batches:
            micro_batches.append(self._ahead)
            self._ahead = self._pull()
        last_of_epoch = self._ahead is None
        if last_of_epoch:
            self._iterator = None
        samples = StepSamples(self._next_step, self._epoch, micro_batches, last_of_epoch)
        self._next_step += 1
        return samples

    def _pull(self) -> list[int] | None:
        """Return the next list of indices; None at the end of the epoch."""
        assert self._iterator is not None
        indices = next(self._iterator, None)
        return None if indices is None else [operator.index(index) for index in indices]


_at_begin: "weakref.WeakKeyDictionary[Any, list[Any]]" = weakref.WeakKeyDictionary()


def _states_at_begin(sampler: Any, generators: Mapping[str, Generator]) -> list[Any]:
    """Return the states that a sampler's own generators had when it was first used here.

    A second pass over its first epochs, after a rollback for instance, then gives the same order.
    """
    now = states_of(generators)
    try:
        before = _at_begin.setdefault(sampler, now)
    except TypeError:  # a list, which has no generators
        return now
    return before if len(before) == len(now) else now


Order = SampleOrder | SamplerOrder


class DistributedSampler(Sampler[int]):
    """Yields this rank's samples of each epoch, in the trainer's own order.

    Rank r of W takes positions r, r + W, r + 2W … of the epoch's order, so that the W ranks' k-th
    batches together hold the samples of the trainer's k-th step. No sample is repeated or left out:
    the first ranks may have one sample more (`len` differs by one), for which a loop that
    communicates at each batch must allow (`torch.distributed.algorithms.Join`), or set `drop_last`,
    which leaves out `dropped_per_epoch` samples. Each iteration moves on to the next epoch by
    itself; `set_epoch` sets the next one (after a resume). The `seed` is the same on all ranks;
    `num_replicas` and `rank` are those of the process group, else of the environment, if unset.
    `order` is as `data.order` of a config.

    A UsageError is raised for an empty dataset, or a rank that is not below `num_replicas`.
    """

    def __init__(
        self,
        dataset_or_size: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        order: str = "auto",
    ) -> None:
        if dist.is_available() and dist.is_initialized():
            world_size = dist.get_world_size()
            own_rank = dist.get_rank()
        else:
            facts = rank_facts()
            world_size = facts.world_size
            own_rank = facts.rank
        self.num_samples = (
            dataset_or_size if isinstance(dataset_or_size, int) else len(dataset_or_size)
        )
        self.num_replicas = world_size if num_replicas is None else num_replicas
        self.rank = own_rank if rank is None else rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.order = order
        self.epoch = 0  # of the next iteration
        if not 0 <= self.rank < self.num_replicas:
            what = f"rank {self.rank} is not below num_replicas {self.num_replicas}"
            raise UsageError(
                what,
                fix="ranks count from 0; leave both out, and they are those of the process group",
            )
        self.dropped_per_epoch = self.num_samples % self.num_replicas if drop_last else 0
        if self.num_samples - self.dropped_per_epoch < 1:
            what = (
                f"{self.num_samples} samples leave nothing for {self.num_replicas} ranks to share"
            )
            raise UsageError(what, fix="use fewer ranks, more samples, or drop_last=False")

    def __len__(self) -> int:
        return len(range(self.rank, self.num_samples - self.dropped_per_epoch, self.num_replicas))

    def __iter__(self) -> Iterator[int]:
        epoch = self.epoch
        self.epoch += 1
        return self._samples(epoch)

    def _samples(self, epoch: int) -> Iterator[int]:
        shares = range(self.rank, self.num_samples - self.dropped_per_epoch, self.num_replicas)
        order = epoch_order(self.num_samples, self.seed, shuffle=self.shuffle, order=self.order)
        for first in range(0, len(shares), AHEAD):
            yield from order.samples(epoch, shares[first : first + AHEAD])

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
