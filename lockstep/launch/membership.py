"""Whether machines wait to join a run of several."""

import threading
import time
from collections.abc import Callable

from lockstep.errors import RunError


class Membership:
    """How many machines wait to join, asked for in the background, once a second.

    The library asks within the loop that watches the ranks; where the link to the meeting point is cut, its store never
    answers, and nobody would watch any more.

    Args:
        ask: the library's own question.
    """

    def __init__(self, ask: Callable[[], int]) -> None:
        self._ask = ask
        self.begin()

    def begin(self) -> None:
        """The machines have just met."""
        self._found: list[int | Exception] = [0]
        self._thread: threading.Thread | None = None
        self._asked = time.monotonic()

    def __call__(self) -> int:
        newest = self._found[-1]
        if isinstance(newest, Exception):
            raise newest
        if not self._is_asking() and time.monotonic() - self._asked > 1.0:
            self._asked = time.monotonic()
            self._thread = threading.Thread(target=self._run, args=(self._found,), daemon=True)
            self._thread.start()
        return newest

    def check(self, seconds: float = 30.0) -> None:
        """Before the machines meet again.

        Raises:
            RunError: the meeting point has not answered for so long.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, self._asked + seconds - time.monotonic()))
        if self._is_asking():
            raise RunError(
                f"the meeting point of the machines has not answered for {time.monotonic() - self._asked:.0f} s",
                why="the link to it is cut, or the machine that hosts it is gone",
                fix="start the command again on all machines; the run goes on from its newest checkpoint",
            )

    def _is_asking(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self, found: list[int | Exception]) -> None:
        try:
            found.append(self._ask())
        except Exception as error:  # told by the loop that watches the ranks
            found.append(error)
