"""Keeps the order in which loaders read their data, pass by pass, and reads on to its end.

Some steps show a small part of an epoch only. Ranks that deal out batches of other orders read each
other's samples there by chance, or not at all; of complete passes the positions tell. When the last
step is taken, the iterators that gave positions to a loader go on, and no sample is read:

    rank 0's pass     3 1 | 0 7     of which the steps have used 3 1
    rank 1's pass     5 7 | 2 0     0 and 7 are read twice, 4 and 6 by nobody

Tests: tests/verify/test_orders.py
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from lockstep.verify.own_lines import order_of, own_line

_MOST = 1_000_000  # positions of a pass; one that has more is not compared
_ENOUGH = 6  # pieces that have the same order twice by chance in 1 of 720 passes
_OTHER_EPOCHS = 3  # that a sampler is asked for


@dataclass
class LoaderPass:
    """One pass of a loader over its data: the positions of samples, as they are asked for."""

    positions: list[int] = field(default_factory=list)
    is_complete: bool = False  # whether these are all of them


class ObservedOrder:
    """Iterates over what a sampler gives a loader, and keeps the positions in it.

    Args:
        given: by the sampler: positions, or lists of them.
        draws: returns how often random numbers were drawn so far.
    """

    def __init__(self, given: Iterator[Any], draws: Callable[[], int] = lambda: 0) -> None:
        self.kept = LoaderPass()
        self.pieces = 0  # that were given: positions, or batches of them
        self.shuffles = False  # whether the sampler has drawn random numbers in this pass
        self.is_trained_on = False
        self.epoch: object = None  # of the sampler, where it has one
        self.line = own_line()  # that began the pass
        self._given = given
        self._draws = draws
        self._is_known = True  # whether all that was given are positions

    def __iter__(self) -> "ObservedOrder":
        return self

    def __next__(self) -> Any:
        before = self._draws()
        try:
            given = next(self._given)
        except StopIteration:
            self.kept.is_complete = self._is_known
            raise
        self.shuffles |= self._draws() > before
        self._keep(given)
        return given

    def _keep(self, given: Any) -> None:
        """Keep the positions in what was given: one, or those of a batch."""
        self.pieces += 1
        positions = given if isinstance(given, list | tuple) else [given]
        try:
            self.kept.positions.extend(int(position) for position in positions)
        except (TypeError, ValueError):  # keys, or positions with something else
            self._is_known = False

    def read_on(self) -> None:
        """Take the rest of the positions, as far as they are known and not too many."""
        with suppress(Exception):  # a sampler may not like to be asked for more
            while self._is_known and len(self.kept.positions) <= _MOST:
                next(self)

    def repeats(self, other: "ObservedOrder") -> bool:
        """Return whether both are complete, were shuffled, and have the same order."""
        are_complete = self.kept.is_complete and other.kept.is_complete
        are_shuffled = self.shuffles and other.shuffles
        return are_complete and are_shuffled and self.kept.positions == other.kept.positions


@dataclass
class _ObservedLoader:
    """The passes of a loader."""

    loader: Any
    passes: list[ObservedOrder] = field(default_factory=list)
    steps: int = 0  # those taken when the last pass began


class ObservedOrders:
    """All passes of the loaders of a process.

    Args:
        number_of: returns the number of a loader; None: it is not observed.
        steps: returns how many steps were taken.
        draws: returns how often random numbers were drawn.
        find: is given a mistake of the loop: kind, text, fix and line.
    """

    def __init__(
        self,
        number_of: Callable[[Any], int | None],
        steps: Callable[[], int],
        draws: Callable[[], int],
        find: Callable[[str, str, str, str], None],
    ) -> None:
        self._number_of = number_of
        self._steps = steps
        self._draws = draws
        self._find = find
        self._loaders: dict[int, _ObservedLoader] = {}

    def begun(self, loader: Any, positions: Iterator[Any]) -> Iterator[Any]:
        """Observe a pass that begins, and return the iterator from which it takes positions."""
        number = self._number_of(loader)
        if number is None:
            return positions
        observed = self._loaders.setdefault(number, _ObservedLoader(loader))
        self._end_pass(observed)
        observed.loader = loader
        observed.steps = self._steps()
        order = ObservedOrder(positions, self._draws)
        order.epoch = getattr(_sampler_with_epochs(loader), "epoch", None)
        observed.passes.append(order)
        return order

    def _end_pass(self, observed: _ObservedLoader) -> None:
        """Note whether a step was taken in the last pass; else it was a look at a batch."""
        for order in observed.passes[-1:]:
            order.is_trained_on = self._steps() > observed.steps

    def complete(self) -> dict[int, list[LoaderPass]]:
        """Read on to the end of each pass; return, by loader, those that were trained on."""
        found = {}
        for number, observed in self._loaders.items():
            self._end_pass(observed)
            orders = [order for order in observed.passes if order.is_trained_on]
            for order in orders:
                order.read_on()
            self._check(observed.loader, orders)
            found[number] = [order.kept for order in orders]
        return found

    def _check(self, loader: Any, orders: Sequence[ObservedOrder]) -> None:
        """Find a pass that is shuffled, and has the order of the pass before it."""
        for before, order in pairwise(orders):
            if order.repeats(before):
                words = _in_words(loader, before, order)
                if words is not None:
                    self._find("order of samples", *words)
                    return


def _sampler_with_epochs(loader: Any) -> Any:
    """Return what orders a loader's samples and can be told the epoch; None if nothing can."""
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        if hasattr(sampler, "set_epoch"):
            return sampler
    return None


def _in_words(
    loader: Any, before: ObservedOrder, order: ObservedOrder
) -> tuple[str, str, str] | None:
    """Return what is wrong with a pass in the order of another, the fix, and the line.

    None if it may be chance.
    """
    text = "each epoch reads the samples in the same order, though the sampler shuffles them: "
    own = order_of(loader) or order.line
    sampler = _sampler_with_epochs(loader)
    if sampler is None:
        if order.pieces < _ENOUGH:
            return None
        text += "its generator begins with the same seed each time"
        return text, "seed the order of each epoch otherwise", own
    if not _depends_on_epochs(sampler, order.kept.positions):
        text += "its order does not depend on the epoch that it is told"
        return text, "seed the sampler's generator with seed + epoch", own
    if before.epoch is None or before.epoch != order.epoch:
        return None
    text += "its set_epoch is not called"
    return text, "sampler.set_epoch(epoch) before each epoch", order.line


def _depends_on_epochs(sampler: Any, positions: Sequence[int]) -> bool:
    """Return whether a sampler has another order in any of some other epochs.

    One that can't be asked is taken for one that has.
    """
    epoch = getattr(sampler, "epoch", 0)
    for further in range(1, _OTHER_EPOCHS + 1):
        try:
            other = copy.copy(sampler)
            other.set_epoch(epoch + further)
            order = ObservedOrder(iter(other))
            order.read_on()
        except Exception:
            return True
        if order.kept.positions != list(positions):
            return True
    return False
