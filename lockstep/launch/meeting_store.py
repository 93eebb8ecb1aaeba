"""The store through which machines meet, which always answers or raises while they do.

A TCPStore behind a link that is cut never answers: no packet comes back, and its client reads for
ever. While a run trains, that is right: a link may come back. While machines meet, before their
ranks are started, it is an error. Loads torch.

Tests: tests/launch/test_meeting_store.py
"""

import datetime
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from lockstep.store_threads import answer_within

_T = TypeVar("_T")

# An answer may take so much longer than the store itself waits for a key: more than a loaded
# machine takes.
_MARGIN_SECONDS = 30.0


def connect(host: str, port: int, patience: float) -> TCPStore:
    """Connect to a store that another process hosts.

    Raises:
        TimeoutError: it took the connection, and has not answered since.
        DistNetworkError: nothing has taken the connection within `patience` seconds.
    """
    timeout = datetime.timedelta(seconds=patience)
    return answer_within(
        patience + _MARGIN_SECONDS,
        lambda: TCPStore(host, port, None, False, timeout, wait_for_workers=False),
    )


class MeetingStore(Store):
    """Asks a TCPStore, with a limit on the time of each call while machines meet.

    Args:
        store: the one to ask.
        seconds: how long it waits for a key that nobody has set.
        margin: seconds that an answer may take beyond that.
    """

    def __init__(self, store: TCPStore, seconds: float, margin: float = _MARGIN_SECONDS) -> None:
        super().__init__()
        store.set_timeout(datetime.timedelta(seconds=seconds))
        self._asked = store
        self._seconds = seconds + margin
        self._meeting_since = math.inf

    @property
    def port(self) -> int:
        """The port at which the store listens."""
        return self._asked.port

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Limit each call for the length of the block, those included that wait already."""
        before = self._meeting_since
        self._meeting_since = min(before, time.monotonic())
        try:
            yield
        finally:
            self._meeting_since = before

    def _ask(self, call: Callable[[], _T]) -> _T:
        began = time.monotonic()

        def is_over() -> bool:
            return time.monotonic() - max(began, self._meeting_since) > self._seconds

        try:
            return answer_within(math.inf, call, given_up=is_over)
        except TimeoutError:
            if not is_over():
                raise
            raise TimeoutError(
                f"the store where the machines meet has not answered for {self._seconds:g} s: the"
                " link to it is cut, or the machine that hosts it stands still"
            ) from None

    # The methods of a store, by torch's names: prefixes around this one call them, too.

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._asked.set(key, value))

    def get(self, key: str) -> bytes:
        return self._ask(lambda: self._asked.get(key))

    def add(self, key: str, value: int) -> int:
        return self._ask(lambda: self._asked.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: self._asked.check(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask(lambda: self._asked.compare_set(key, expected, desired))

    def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
        self._ask(lambda: self._asked.wait(keys, *timeout))

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda: self._asked.delete_key(key))

    def num_keys(self) -> int:
        return self._ask(self._asked.num_keys)

    def has_extended_api(self) -> bool:
        return True

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._ask(lambda: self._asked.multi_get(keys))

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self._ask(lambda: self._asked.multi_set(keys, values))  # type: ignore[attr-defined]
