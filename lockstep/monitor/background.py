"""Sinks that write while training goes on: a thread takes the rows in order, a few times a second, all that there are.

So a row costs the step what it takes to hand it over, a slow disk costs nothing, and neither does a server that hangs.
Files share one thread; each server has its own. `flush` writes what there is: before a checkpoint, so that a run that
goes on from it has the rows before it. A process that is killed loses the rows of its last moment; what is written is
whole.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from lockstep.monitor.sinks import Guarded, Row

PAUSE_SECONDS = 0.2
CAPACITY = 10_000  # rows; a server that hangs for longer loses what comes after
CLOSING_SECONDS = 60.0
_log = logging.getLogger("lockstep")


class Background:
    """Some sinks with a thread of their own.

    Args:
        event: told, once, that rows were dropped, or that a sink did not end.
    """

    def __init__(self, sinks: Sequence[Guarded], event: Callable[..., None], capacity: int = CAPACITY) -> None:
        self._sinks, self._event, self._capacity = list(sinks), event, capacity
        self._rows: deque[tuple[str, Row]] = deque()
        self._there_are_rows, self._hurry, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._closing = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="lockstep-sinks", daemon=True)
        self._thread.start()

    @property
    def names(self) -> str:
        return ", ".join(sink.name for sink in self._sinks)

    def on_step(self, row: Row) -> None:
        self._put("on_step", row)

    def on_eval(self, row: Row) -> None:
        self._put("on_eval", row)

    def flush(self, seconds: float = 5.0) -> None:
        """Wait until all rows are written, for so long at most."""
        until = time.monotonic() + seconds
        while self._rows or not self._idle.is_set():
            self._there_are_rows.set()
            self._hurry.set()
            if not self._thread.is_alive() or time.monotonic() > until:
                return
            self._idle.wait(0.05)

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Write what is left, for so long at most, and close the sinks."""
        self._closing = True
        self._hurry.set()
        self._there_are_rows.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._say(f"{self.names} did not end within {seconds:g} s; its last rows may be missing")

    def _put(self, method: str, row: Row) -> None:
        if len(self._rows) >= self._capacity:
            self._dropped += 1
            if self._dropped == 1:
                self._say(f"{self.names} is far behind; rows are dropped")
            return
        self._rows.append((method, row))
        if not self._there_are_rows.is_set():
            self._idle.clear()
            self._there_are_rows.set()

    def _say(self, text: str) -> None:
        _log.warning("warning: %s", text)
        self._event("sink_failed", sink=self.names, reason=text)

    def _run(self) -> None:
        while not self._closing:
            self._there_are_rows.wait()
            self._hurry.wait(PAUSE_SECONDS)
            self._hurry.clear()
            self._there_are_rows.clear()
            self._write()
            if not self._rows:
                self._idle.set()
        self._write()
        for sink in self._sinks:
            sink.close()

    def _write(self) -> None:
        while self._rows:
            method, row = self._rows.popleft()
            for sink in self._sinks:
                call: Any = getattr(sink, method)
                call(row)
