"""One epoch of an iterable, read one item ahead."""

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

from lockstep.data.reader import users_line
from lockstep.data.seeding import outer_states_kept, seed_from, tell_epoch
from lockstep.errors import LockstepError, RunError, UsageError


class Stream:
    """One epoch of an iterable, one item ahead, to know its end in time.

    Args:
        position: items that were read before, of which `state` tells the iterable.
        state: the iterable's own `state_dict`; None: from the start of the epoch.
        key: tells this stream's random numbers from those of other ranks' streams.
    """

    def __init__(self, iterable: Any, seed: int, epoch: int, position: int, state: Any, key: int) -> None:
        self._iterable = iterable
        self._keys = ("iterable", seed, epoch, key)
        self._ahead: list[Any] = []
        self.position = position  # items handed out
        self.state: Any = state  # the iterable's own, before the item that is ahead
        self.stateful = hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict")
        told = [tell_epoch(holder, epoch) for holder in (iterable, getattr(iterable, "dataset", None))]
        self.told_epoch = any(told)
        if state is not None:
            iterable.load_state_dict(copy.deepcopy(state))
        with outer_states_kept():
            seed_from(*self._keys, "start")
            self._iterator: Iterator[Any] = self._guarded(lambda: iter(iterable))
            self._pull()

    @property
    def more(self) -> bool:
        """Whether there is another item."""
        return bool(self._ahead)

    def take(self, count: int, size: int) -> list[list[Any]]:
        """Up to `count` pieces of `size` items; the last may be shorter."""
        pieces: list[list[Any]] = []
        with outer_states_kept():
            while self._ahead and len(pieces) < count:
                piece: list[Any] = []
                while self._ahead and len(piece) < size:
                    piece += self._ahead
                    self.position += 1
                    if len(piece) == size and len(pieces) == count - 1:
                        self._keep_state()
                    self._pull()
                pieces.append(piece)
        return pieces

    def close(self) -> None:
        """Let go of the iterator: so end a generator, and the workers of a DataLoader that does not keep them."""
        self._iterator = iter(())

    def _pull(self) -> None:
        seed_from(*self._keys, self.position)
        self._ahead = self._guarded(lambda: list(itertools.islice(self._iterator, 1)))

    def _keep_state(self) -> None:
        if not self.stateful:
            return
        self.state = copy.deepcopy(self._iterable.state_dict())
        try:
            json.dumps(self.state)
        except TypeError as error:
            raise UsageError(
                f"the state_dict of {type(self._iterable).__name__} can't be saved",
                why=f"a checkpoint holds numbers, texts, lists and dicts of such: {error}",
                fix="return such from state_dict, or leave it out: a resumed run then reads up to where it stood",
            ) from None

    def _guarded(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except LockstepError:
            raise
        except Exception as error:
            raise RunError(
                f"item {self.position} of the {type(self._iterable).__name__} failed in epoch {self._keys[2]}",
                where=users_line(error),
                why=f"{type(error).__name__}: {error}".splitlines()[0],
            ) from error
