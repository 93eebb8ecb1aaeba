"""Defines sinks, which take rows of plain numbers, and the thread that feeds them.

One of the sinks (`jsonl`) is here.

A sink that fails while a run trains is reported once, and does not stop it. A slow disk or a server
that hangs costs a step nothing: rows are written in a thread, several times a second, in order. A
killed process loses the rows of its last moment.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.config import MonitorConfig
from lockstep.monitor.media import MEDIA_KINDS, Media, file_name
from lockstep.registry import SINKS, require_call
from lockstep.run_directory.records import RunDirectory
from lockstep.run_directory.run_files import replace_file

Row = dict[str, Any]
Event = Callable[..., None]

_log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class SinkContext:
    """Arguments of a sink."""

    config: MonitorConfig
    run: RunDirectory | None  # None: nothing is written
    total_steps: int | None  # of the whole run, if known
    start_step: int  # the step that this process resumes from

    @property
    def directory(self) -> RunDirectory:
        assert self.run is not None, (
            "a sink that uses the run directory must set needs_run_directory"
        )
        return self.run

    @property
    def experiment(self) -> str:
        return self.config.experiment or "lockstep"


class Sink(Protocol):
    """A destination of records, made with a `SinkContext`.

    `row` has plain numbers by the names of `StepRecord`.

    A sink may also have `on_media(step, media)`, for texts, images and histograms by name
    (`lockstep.monitor.media`), and `media_kinds`, where it takes some kinds alone. Numbers that a
    user logs come to `on_eval`.

    Optional attributes: `at_once = True` writes in the training thread, for output that people see
    at once, and `each_step = True` with it calls `on_each_step(record)` after every step, whose
    tensors are not read yet; `own_thread = True` is for servers that may hang; `needs_run_directory
    = True` leaves the sink out if there is none. An `ImportError` from its constructor leaves it
    out with a warning.
    """

    def on_step(self, row: Row) -> None:
        """Take a logged step."""

    def on_eval(self, row: Row) -> None:
        """Take an evaluation."""

    def close(self) -> None:
        """Write all rows and end."""


def sink_named(name: str) -> Callable[[SinkContext], Any]:
    """Return the class or function of a sink that a config names."""
    kind = SINKS.load_callable(name)
    if name not in SINKS.shipped:
        require_call(kind, ("context",), name, SINKS.where)
    return kind


class Jsonl:
    """Writes `metrics.jsonl` of the run directory."""

    needs_run_directory = True
    rows_wait = True  # each is appended whole or not at all, so it may be tried again

    def __init__(self, context: SinkContext) -> None:
        self._run = context.directory

    def on_step(self, row: Row) -> None:
        self._run.append_metrics(row)

    on_eval = on_step

    def on_media(self, step: int, media: Mapping[str, Media]) -> None:
        """Append a row, and write images beside it, as `media/NAME-STEP.png`."""
        row: Row = {}
        for name, value in media.items():
            row[name] = {"kind": value.kind}
            if value.kind == "text":
                row[name]["text"] = value.text
            elif value.kind == "histogram":
                row[name] |= {"counts": value.counts, "edges": value.edges}
            else:
                self._run.media.mkdir(exist_ok=True)
                file = self._run.media / f"{file_name(name, step)}.png"
                replace_file(file, value.png)
                row[name] |= {"file": f"{self._run.media.name}/{file.name}", "size": value.size}
        self._run.append_metrics({"step": step, "time": time.time(), "media": row})

    def close(self) -> None:
        """Do nothing: every row is written already."""


PAUSE_SECONDS = 0.2
CAPACITY = 10_000  # rows; if a server hangs for longer, later rows are dropped
FLUSHING_SECONDS = 5.0
CLOSING_SECONDS = 60.0


class Guarded:
    """Turns a sink's failures into one warning and one event.

    It is tried again after a pause that grows with the time it took to fail: a twentieth of the run
    is lost at most. Rows of a sink with `rows_wait` are kept meanwhile, up to `CAPACITY`, and are
    sent in their order; those of others, which may have sent a part of a row, are dropped.
    """

    def __init__(self, name: str, sink: Any, event: Event) -> None:
        self.name = name
        self._sink = sink
        self._event = event
        self.each_step: bool = getattr(sink, "each_step", False)
        self._rows_wait: bool = getattr(sink, "rows_wait", False)
        takes_media = callable(getattr(sink, "on_media", None))
        self.media_kinds: set[str] = (
            set(getattr(sink, "media_kinds", MEDIA_KINDS)) if takes_media else set()
        )
        self._waiting: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=CAPACITY)
        self.failures = 0
        self._not_before = 0.0

    def flush(self) -> None:
        if self._waiting:
            # a checkpoint promises that the rows up to it are there: try at once
            self._not_before = 0.0
        self.send("flush")

    def close(self) -> None:
        self._not_before = 0.0
        self.send("close")

    def send(self, method: str, *args: Any) -> None:
        if self._rows_wait:
            self._waiting.append((method, args))
            while self._waiting and self._call(*self._waiting[0]):
                self._waiting.popleft()
        else:
            self._call(method, args)

    def _call(self, method: str, args: tuple[Any, ...]) -> bool:
        """Call a method of the sink; return whether that is done."""
        call = getattr(self._sink, method, None)
        since = time.monotonic()
        if not callable(call):
            return True
        if since < self._not_before:
            return False
        try:
            call(*args)
        except Exception as error:  # of any library or the user's own code: none may stop the run
            self.failures += 1
            now = time.monotonic()
            self._not_before = now + (now - since) * 20 * self.failures
            if self.failures == 1:
                reason = f"{type(error).__name__}: {error}"
                trace = os.environ.get("LOCKSTEP_TRACEBACK") == "1"
                _log.warning(
                    "warning: %s failed, training goes on: %s", self.name, reason, exc_info=trace
                )
                self._event("sink_failed", sink=self.name, reason=reason)
            return False
        return True


class Background:
    """Feeds some sinks from a thread of its own.

    `event` is called if rows are dropped, or if a sink does not end.
    """

    each_step = False

    def __init__(self, sinks: Sequence[Guarded], event: Event) -> None:
        self._sinks = list(sinks)
        self._event = event
        self._names = ", ".join(sink.name for sink in sinks)
        self.media_kinds = set[str]().union(*(sink.media_kinds for sink in sinks))
        self._rows: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._there_are_rows = threading.Event()
        self._hurry = threading.Event()
        self._idle = threading.Event()
        self._closing = False
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name="lockstep-sinks", daemon=True)
        self._thread.start()

    def send(self, method: str, *args: Any) -> None:
        if len(self._rows) >= CAPACITY:
            self._dropped += 1
            if self._dropped == 1:
                self._warn(f"{self._names} is far behind; rows are dropped")
            return
        self._rows.append((method, args))
        if not self._there_are_rows.is_set():
            self._idle.clear()
            self._there_are_rows.set()

    def flush(self) -> None:
        """Wait until all rows are written, or `FLUSHING_SECONDS` are over."""
        until = time.monotonic() + FLUSHING_SECONDS
        while self._rows or not self._idle.is_set():
            self._there_are_rows.set()
            self._hurry.set()
            if not self._thread.is_alive() or time.monotonic() > until:
                return
            self._idle.wait(0.05)

    def close(self) -> None:
        """Write the remaining rows, for at most `CLOSING_SECONDS`, and close the sinks."""
        self._closing = True
        self._hurry.set()
        self._there_are_rows.set()
        self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive():
            self._warn(
                f"{self._names} did not end within {CLOSING_SECONDS:g} s; its last rows may be"
                " missing"
            )

    def _warn(self, text: str) -> None:
        _log.warning("warning: %s", text)
        self._event("sink_failed", sink=self._names, reason=text)

    def _run(self) -> None:
        """Write rows as they come, in a thread, until the sinks are closed."""
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
            method, args = self._rows.popleft()
            for sink in self._sinks:
                sink.send(method, *args)


_PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "prometheus": "prometheus-client",
}


def warn_left_out(sink: str, error: ImportError) -> None:
    """Warn that the library of a sink is not installed."""
    package = _PACKAGES.get(sink)  # None: a user's own sink
    why = str(error) if package is None else "its package is not installed"
    fix = "install it" if package is None else f"pip install {package}"
    _log.warning(
        "warning: the sink %s is left out: %s (%s, or remove it from monitor.sinks)", sink, why, fix
    )


_NOT_SCALARS = {"step", "time", "skipped", "own_seconds"}


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Return every number of a record by name: `loss`, `phases/data` ….

    For a spread they are its median, and its maximum as NAME.most.
    """
    numbers = (
        pair
        for key, inside in row.items()
        if key not in _NOT_SCALARS
        for pair in _numbers_in(key, inside)
    )
    return {name: float(value) for name, value in numbers}


def _numbers_in(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield (name, number) for all numbers in a record's field; of a spread, median and most."""
    if isinstance(value, (int, float)):
        yield name, value
    elif isinstance(value, dict):
        for key, inside in value.items():
            yield from _numbers_in(f"{name}/{key}", inside)
    elif isinstance(value, list) and len(value) == 4:
        _, middle, most, _ = value
        if name.startswith("memory/"):
            yield name, most  # not the median
        else:
            yield name, middle
            yield f"{name}.most", most
