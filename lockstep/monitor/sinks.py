"""A sink takes rows of plain numbers. A sink that fails is said once and never stops the run.

`jsonl` and the events go through `records.RunDirectory`; `console` and `tensorboard` have files of their own.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.config import MonitorConfig
from lockstep.monitor.missing import left_out
from lockstep.records import RunDirectory
from lockstep.registry import SINKS

Row = dict[str, Any]
Event = Callable[..., None]

_log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class SinkContext:
    """What a sink is made with.

    Attributes:
        config: the section `monitor`.
        run: the run directory; None where nothing is written.
        total_steps: of the whole run, where known.
        start_step: the step that this process goes on from.
    """

    config: MonitorConfig
    run: RunDirectory | None
    total_steps: int | None
    start_step: int

    @property
    def directory(self) -> RunDirectory:
        """Return the run directory, for sinks that need one."""
        assert self.run is not None, "a sink that needs a run directory says so: needs_run_directory"
        return self.run

    @property
    def experiment(self) -> str:
        """Return the project or experiment that runs belong to."""
        return self.config.experiment or "lockstep"


class Sink(Protocol):
    """Where records go: made of a `SinkContext`. `row` holds plain numbers by the names of `StepRecord`.

    A class may say more of itself: `at_once = True`: written in the training thread, for what is seen at once;
    `own_thread = True`: for servers that may hang; `needs_run_directory = True`: left out where there is none. An
    `ImportError` from its constructor leaves it out with a warning.
    """

    def on_step(self, row: Row) -> None: ...

    def on_eval(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Written(Sink, Protocol):
    """A sink that may hold rows back for a moment."""

    def flush(self) -> None:
        """Write them."""


class Jsonl:
    """`metrics.jsonl` of the run directory."""

    needs_run_directory = True

    def __init__(self, context: SinkContext) -> None:
        self._run = context.directory

    def on_step(self, row: Row) -> None:
        self._run.append_metrics(row)

    def on_eval(self, row: Row) -> None:
        self._run.append_metrics(row)

    def close(self) -> None:
        """Every line is on its way already."""


class Guarded:
    """A sink whose failures become one warning and one event.

    It is tried again, the later the longer it took to fail: a server that is down costs the run a twentieth of its time
    at most, and less each time.
    """

    def __init__(self, name: str, sink: Sink, event: Event) -> None:
        self.name, self._sink, self._event = name, sink, event
        self.failures = 0
        self._not_before = 0.0

    def on_step(self, row: Row) -> None:
        self._guard(self._sink.on_step, row)

    def on_eval(self, row: Row) -> None:
        self._guard(self._sink.on_eval, row)

    def flush(self) -> None:
        flush = getattr(self._sink, "flush", None)
        if flush is not None:
            self._guard(flush)

    def close(self) -> None:
        self._not_before = 0.0
        self._guard(self._sink.close)

    def _guard(self, call: Callable[..., object], *args: Any) -> None:
        since = time.monotonic()
        if since < self._not_before:
            return
        try:
            call(*args)
        except Exception as error:  # of any library, of the user's own code: none is worth the run
            self.failures += 1
            now = time.monotonic()
            self._not_before = now + (now - since) * 20 * self.failures
            if self.failures == 1:
                reason = f"{type(error).__name__}: {error}"
                _log.warning("warning: %s failed, training goes on: %s", self.name, reason, exc_info=_trace_wanted())
                self._event("sink_failed", sink=self.name, reason=reason)


def _trace_wanted() -> bool:
    return os.environ.get("LOCKSTEP_TRACEBACK") == "1"


def build_sinks(
    config: MonitorConfig, run: RunDirectory | None, total_steps: int | None, start_step: int, event: Event,
    say: Callable[[str], None] = lambda _line: None,
) -> list[Written]:  # fmt: skip
    """The sinks that the config names; one whose library is missing is left out with one warning.

    What is seen at once, the console and Prometheus, is written at once; files and servers have threads.

    Args:
        say: told a line for the person who started the run.
    """
    from lockstep.monitor.background import Background

    context = SinkContext(config, run, total_steps, start_step)
    made: list[Written] = []
    files: list[Guarded] = []
    for name in config.sinks:
        kind = SINKS.load(name)
        if run is None and getattr(kind, "needs_run_directory", False):
            continue
        try:
            guarded = Guarded(f"the sink {name}", kind(context), event)
        except ImportError as error:
            left_out(name, name if name in SINKS.shipped else None, error)
            continue
        if getattr(kind, "at_once", False):
            made.append(guarded)
        elif getattr(kind, "own_thread", False):
            made.append(Background([guarded], event))
        else:
            files.append(guarded)
    if files:
        made.append(Background(files, event))
    if config.prometheus is not None:
        from lockstep.monitor.prometheus import open_prometheus

        served = open_prometheus(config.prometheus, "" if run is None else run.path.resolve().name)
        if served is not None:
            event("prometheus", address=served.address)
            say(f"metrics for Prometheus at {served.address}")
            made.append(Guarded("the sink prometheus", served, event))
    return made
