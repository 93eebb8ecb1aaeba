"""Threads that talk to torch's stores, or call other functions of C++ that let go of the GIL.

When Python ends, it ends every thread that wants the GIL back. Where the caller is C++, which has
no place for that, the whole process is aborted (SIGABRT), after a good run. So these threads are
asked to end, and waited for, before the interpreter ends. A thread that waits in Python or in C may
be a plain one.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")

_CLOSING_SECONDS = 2.0  # for an answer that is under way; a broken link never brings one
_LOOK_SECONDS = 0.02

_started: "weakref.WeakSet[StoreThread]" = weakref.WeakSet()


class StoreThread(threading.Thread):
    """Runs a function in a thread that `close`, or the end of Python, ends.

    Args:
        work: is called with the thread. It returns soon once `closing` is set: a loop looks at it,
            and nothing waits inside of a store for longer than a second or two.
        name: of the thread.
        wake: makes `work` look at `closing`, where it waits for something else.
    """

    def __init__(
        self,
        work: "Callable[[StoreThread], object]",
        name: str,
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.closing = threading.Event()
        self._work = work
        self._wake = wake
        _started.add(self)
        self.start()

    def run(self) -> None:
        """Call the function."""
        self._work(self)

    def close(self, seconds: float = _CLOSING_SECONDS) -> None:
        """Ask the thread to end, and wait for it; give up after some seconds."""
        self.closing.set()
        self._wake()
        self.join(seconds)


def answer_within(
    seconds: float, call: Callable[[], _T], *, given_up: Callable[[], bool] = lambda: False
) -> _T:
    """Return what a function that waits in C++ returns, or raise what it raises.

    A store behind a broken link never answers, and keeps whoever asks it meanwhile.

    Args:
        seconds: how long to wait for it.
        call: the function.
        given_up: is asked meanwhile whether the answer is of no use any more.

    Raises:
        TimeoutError: it has not returned after these seconds, or is given up. Its thread stays
            where it waits.
    """
    returned: list[_T] = []
    raised: list[Exception] = []

    def ask(_thread: StoreThread) -> None:
        try:
            returned.append(call())
        except Exception as error:
            raised.append(error)

    thread = StoreThread(ask, "store-answer")
    deadline = time.monotonic() + seconds
    while thread.is_alive() and not given_up():
        left = deadline - time.monotonic()
        if left <= 0:
            break
        thread.join(min(left, _LOOK_SECONDS))
    if raised:
        raise raised[0]
    if not returned:
        _started.discard(thread)  # nothing wakes it: the end of Python does not wait for it
        raise TimeoutError(f"no answer within {seconds:g} s")
    return returned[0]


@atexit.register
def _close_all() -> None:
    for thread in list(_started):
        thread.close()
