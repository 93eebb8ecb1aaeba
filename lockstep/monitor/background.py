"""Feeds sinks from a thread, so that a slow disk or a server that hangs costs the step nothing.

Rows are written several times a second, in order. A process that is killed loses the rows of its last moment.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.monitor.media import Media
from lockstep.monitor.sinks import Guarded, Row

_log = logging.getLogger("lockstep")
PAUSE_SECONDS = 0.2
CAPACITY = 10_000  # rows; if a server hangs for longer, later rows are dropped
CLOSING_SECONDS = 60.0


class Background:
    """Feeds some sinks from a thread of its own.

    Args:
        sinks: the sinks.
        event: called once if rows are dropped, or if a sink does not end.
        capacity: rows that may wait.
    """

    def __init__(self, sinks: Sequence[Guarded], event: Callable[..., None], capacity: int = CAPACITY) -> None:
        self._sinks, self._event, self._capacity = list(sinks), event, capacity
        self._rows: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._there_are_rows, self._hurry, self._idle = threading.Event(), threading.Event(), threading.Event()
        self._closing = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="lockstep-sinks", daemon=True)
        self._thread.start()

    @property
    def names(self) -> str:
        """The sinks' names."""
        return ", ".join(sink.name for sink in self._sinks)

    def on_step(self, row: Row) -> None:
        """Queue a step's row."""
        self._put("on_step", row)

    def on_eval(self, row: Row) -> None:
        """Queue an evaluation's row."""
        self._put("on_eval", row)

    def on_media(self, step: int, media: Mapping[str, Media]) -> None:
        """Queue texts, images and histograms."""
        self._put("on_media", step, media)

    def flush(self, seconds: float = 5.0) -> None:
        """Wait at most `seconds` until all rows are written."""
        until = time.monotonic() + seconds
        while self._rows or not self._idle.is_set():
            self._there_are_rows.set()
            self._hurry.set()
            if not self._thread.is_alive() or time.monotonic() > until:
                return
            self._idle.wait(0.05)

    def close(self, seconds: float = CLOSING_SECONDS) -> None:
        """Write the remaining rows, wait at most `seconds`, and close the sinks."""
        self._closing = True
        self._hurry.set()
        self._there_are_rows.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._warn(f"{self.names} did not end within {seconds:g} s; its last rows may be missing")

    def _put(self, method: str, *row: Any) -> None:
        if len(self._rows) >= self._capacity:
            self._dropped += 1
            if self._dropped == 1:
                self._warn(f"{self.names} is far behind; rows are dropped")
            return
        self._rows.append((method, row))
        if not self._there_are_rows.is_set():
            self._idle.clear()
            self._there_are_rows.set()

    def _warn(self, text: str) -> None:
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
                call(*row)
