"""The order that a sampler of the user's gives, in place of ours.

Every rank goes through the whole sampler, which is cheap: it yields indices, not data. Each batch of indices is a
micro-batch, and a step takes the next ones. The sampler draws from generators seeded by (seed, epoch), the same on
every rank, whatever was drawn elsewhere. There is no random access: a resumed run fast-forwards through the indices.
"""

import operator
from collections.abc import Iterable, Iterator
from typing import Any

from lockstep.data.batches import known_length
from lockstep.data.order import Window
from lockstep.data.seeding import outer_states_kept, put_back, seed_from, states, tell_epoch
from lockstep.errors import UsageError


class SamplerOrder:
    """An `Order` by a batch sampler.

    Args:
        batch_sampler: yields lists of dataset indices; iterated anew each epoch, after `set_epoch(epoch)` if it, or the
            sampler within it, has that.
        micro_batches: how many of these lists make up a step.
        seed: of the run.

    Raises:
        UsageError: while iterating: the sampler yields nothing.
    """

    def __init__(self, batch_sampler: Iterable[Any], micro_batches: int, *, seed: int) -> None:
        assert micro_batches >= 1
        self._sampler = batch_sampler
        self._micro_batches = micro_batches
        self._seed = seed
        self._latest: Window | None = None
        self._inner: Any = None  # the generators, as the sampler left them
        self._iterator: Iterator[Any] | None = None  # None: the next epoch is to be begun
        self._ahead: list[int] | None = None  # one list ahead, to know the end of an epoch in time
        self._rewind()

    @property
    def steps_per_epoch(self) -> int | None:
        count = known_length(self._sampler)
        return None if count is None else -(-count // self._micro_batches)

    def window(self, step: int) -> Window:
        """The samples of `step`; cheapest when steps are asked for in turn."""
        if self._latest is not None and self._latest.step == step:
            return self._latest
        if step < self._next_step:
            self._rewind()
        with outer_states_kept():
            if self._inner is not None:
                put_back(self._inner)
            while self._next_step <= step:
                self._latest = self._take()
            self._inner = states()
        assert self._latest is not None
        return self._latest

    def _rewind(self) -> None:
        self._next_step, self._epoch = 0, -1
        self._latest = self._inner = self._iterator = self._ahead = None

    def _take(self) -> Window:
        if self._iterator is None:
            self._begin_epoch()
        taken: list[list[int]] = []
        while self._ahead is not None and len(taken) < self._micro_batches:
            taken.append(self._ahead)
            self._ahead = self._pull()
        if self._ahead is None:
            self._iterator = None
        window = Window(self._next_step, self._epoch, taken, last_of_epoch=self._ahead is None)
        self._next_step += 1
        return window

    def _begin_epoch(self) -> None:
        self._epoch += 1
        seed_from("sampler", self._seed, self._epoch)
        for holder in (self._sampler, getattr(self._sampler, "sampler", None)):
            tell_epoch(holder, self._epoch)
        self._iterator = iter(self._sampler)
        self._ahead = self._pull()
        if self._ahead is None:
            raise UsageError(
                f"the sampler {type(self._sampler).__name__} yields nothing in epoch {self._epoch}",
                why="each epoch iterates it anew" if self._epoch else None,
                fix="give a sampler that can be iterated more than once" if self._epoch else None,
            )

    def _pull(self) -> list[int] | None:
        assert self._iterator is not None
        indices = next(self._iterator, None)
        return None if indices is None else [operator.index(index) for index in indices]
