"""Reads one epoch of an iterable item by item, and finds out whether its state is restored.

Not every `state_dict` restores what was being read: a shuffle buffer's contents, for instance, are
lost. So a run keeps the state from some items before its position, and summaries of these items,
the witnesses: a resumed run reads them again, and compares. After 20 items, 4 a step:

    items         … 11   12 13 14 15   16 17 18 19   | next
                       ^ state, with 8 witnesses        ^ position 20

A run resumed here loads the state from before item 12, reads items 12 to 19 again, compares each
with its witness, and goes on with item 20.

Tests: tests/data/test_iterable.py
"""

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from lockstep.data.fingerprint import alike, summary
from lockstep.data.mistakes import advice, reason, users_line
from lockstep.data.order import set_epoch
from lockstep.errors import LockstepError, RunError, UsageError
from lockstep.heartbeat.writer import recorder_of_work
from lockstep.randomness import preserve_states, seed_from

# items that are compared; a random choice between two sources can restore one by chance
WITNESSES = 8


class NotRestoredError(Exception):
    """Raised if the items that follow a state are not those that followed it before."""

    def __init__(self, position: int, *, ended: bool) -> None:
        super().__init__(position)
        self.position = position  # of the first other item, from 0
        self.ended = ended  # there was none


def start_of(epoch: int, step: int) -> dict[str, Any]:
    """Return the state of data before the first step of an epoch.

    `step` and `position` are the steps and the items of the epoch before the state; `iterable` is
    the iterable's own state, None to load none; `begins` the step and own state at the start of the
    epoch; `witnesses` are summaries of the items from `witnessed` on.
    """
    return {
        "step": step,
        "epoch": epoch,
        "position": 0,
        "iterable": None,
        "begins": None,
        "witnessed": 0,
        "witnesses": [],
    }


class IterableEpoch:
    """Reads one epoch of an iterable, one item ahead, to detect its end in time.

    `position` items were read before `state`; `key` distinguishes the random numbers of ranks that
    read different streams. A NotRestoredError is raised where items differ from the state's
    witnesses.
    """

    def __init__(self, iterable: Any, seed: int, state: dict[str, Any], key: int = -1) -> None:
        self._iterable = iterable
        self._keys = ("iterable", seed, state["epoch"], key)
        self._record_work = recorder_of_work()
        self._ahead: list[Any] = []
        self._expected = state["witnesses"]
        self._expected_from = state["witnessed"]
        self.position = state["position"]  # number of items returned
        # the iterable's own, before the item that was read ahead
        self.state: Any = state["iterable"]
        self.stateful = hasattr(iterable, "state_dict") and hasattr(iterable, "load_state_dict")
        has_epochs = [set_epoch(holder, state["epoch"]) for holder in _holders(iterable)]
        self.has_epochs = any(has_epochs)
        begins = state["begins"]
        with preserve_states():
            seed_from(*self._keys, "start")
            if self.state is not None:
                self._load(self.state)
            elif self.stateful and self.position == 0:
                begins = {"step": state["step"], "state": self._state_before_all()}
            self._iterator: Iterator[Any] = self._guarded(lambda: iter(iterable))
            self._pull()
        first = {
            **state,
            "iterable": begins and begins["state"] if self.position == 0 else self.state,
        }
        self._restarts = [{**first, "begins": begins, "witnessed": self.position, "witnesses": []}]

    @property
    def more(self) -> bool:
        """True if an item is left."""
        return bool(self._ahead)

    @property
    def _expects_more(self) -> bool:
        """Return whether the resumed run had read more items than were read so far."""
        return bool(self.position < self._expected_from + len(self._expected))

    def take(self, count: int, size: int) -> list[list[Any]]:
        """Return up to `count` pieces of `size` items; the last may be shorter."""
        pieces: list[list[Any]] = []
        with preserve_states():
            while self._ahead and len(pieces) < count:
                piece: list[Any] = []
                while self._ahead and len(piece) < size:
                    self._witness(self._ahead[0])
                    piece += self._ahead
                    self.position += 1
                    is_last_of_all = len(piece) == size and len(pieces) == count - 1
                    if is_last_of_all:
                        self._keep_state()  # before the next item is read ahead
                    self._pull()
                pieces.append(piece)
        return pieces

    def restart(self, step: int) -> dict[str, Any]:
        """Return where a run has to start reading, as JSON, that is resumed here, before `step`.

        It is the newest state that has all its witnesses, or the oldest one there is.
        """
        self._restarts.append(
            {
                **self._restarts[-1],
                "step": step,
                "position": self.position,
                "iterable": self.state,
                "witnessed": self.position,
                "witnesses": [],
            }
        )
        while len(self._restarts) > 1 and _has_all_witnesses(self._restarts[1]):
            del self._restarts[0]
        oldest = self._restarts[0]
        return {**oldest, "witnesses": list(oldest["witnesses"])}

    def close(self) -> None:
        """Release the iterator.

        This ends a generator, and the workers of a DataLoader that does not keep them.
        """
        self._iterator = iter(())

    def _witness(self, item: Any) -> None:
        """Compare the next item with that of the run that is resumed.

        Its summary is kept for the next one.
        """
        index = self.position - self._expected_from
        expected = self._expected[index] if 0 <= index < len(self._expected) else None
        open_restarts = []
        if self.stateful:
            open_restarts = [each for each in self._restarts if not _has_all_witnesses(each)]
        if expected is None and not open_restarts:
            return
        witness = summary(item)
        if expected is not None and not alike(witness, expected):
            raise NotRestoredError(self.position, ended=False)
        for restart in open_restarts:
            restart["witnesses"].append(witness)

    def _pull(self) -> None:
        """Read the next item ahead, with the seeds of its position."""
        seed_from(*self._keys, self.position)
        self._ahead = self._guarded(lambda: list(itertools.islice(self._iterator, 1)))
        if self._record_work is not None:
            self._record_work()
        if not self._ahead and self._expects_more:
            raise NotRestoredError(self.position, ended=True)

    def _load(self, state: Any) -> None:
        """Give the iterable a state that it has returned before."""
        try:
            self._iterable.load_state_dict(copy.deepcopy(state))
        except Exception as error:
            if self._expected:
                raise NotRestoredError(self.position, ended=False) from error
            what = (
                f"the {type(self._iterable).__name__} does not load the state that its state_dict"
                " has returned"
            )
            raise RunError(
                what, where=users_line(error), why=reason(error), fix=advice(error)
            ) from error

    def _state_before_all(self) -> Any:
        """Return the iterable's state before it is read.

        None if it has one only later, or none that can be saved.
        """
        with suppress(Exception):
            state = copy.deepcopy(self._iterable.state_dict())
            json.dumps(state)
            return state
        return None

    def _keep_state(self) -> None:
        """Keep the iterable's state after the newest item; refuse one that can't be saved."""
        if not self.stateful:
            return
        self.state = copy.deepcopy(self._iterable.state_dict())
        try:
            json.dumps(self.state)
        except TypeError as error:
            what = f"the state_dict of {type(self._iterable).__name__} can't be saved"
            why = f"a checkpoint holds numbers, texts, lists and dicts of such: {error}"
            fix = (
                "return such from state_dict, or leave it out: a resumed run then reads again what"
                " it had read"
            )
            raise UsageError(what, why=why, fix=fix) from None

    def _guarded(self, read: Callable[[], Any]) -> Any:
        """Read from the iterable; an error says which item failed, in which line of the user's."""
        try:
            return read()
        except LockstepError:
            raise
        except Exception as error:
            # states that are not restored make errors of any kind, and in workers late ones
            if self._expects_more:
                raise NotRestoredError(self.position, ended=True) from error
            what = (
                f"item {self.position} of the {type(self._iterable).__name__} failed in epoch"
                f" {self._keys[2]}"
            )
            raise RunError(
                what, where=users_line(error), why=reason(error), fix=advice(error)
            ) from error


def _has_all_witnesses(restart: dict[str, Any]) -> bool:
    return len(restart["witnesses"]) == WITNESSES


def _holders(iterable: Any) -> list[Any]:
    """Return the objects that may have `set_epoch`.

    These are the iterable, and the dataset and the sampler of a loader.
    """
    return [iterable, getattr(iterable, "dataset", None), getattr(iterable, "sampler", None)]
