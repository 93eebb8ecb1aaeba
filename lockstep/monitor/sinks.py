"""A sink takes rows of plain numbers. A sink that fails is said once and never stops the run.

`jsonl` and the events go through `records.RunDirectory`; `console` and `tensorboard` have files of their own.
"""

import logging
import os
import time
from collections.abc import Callable
from typing import Any, Protocol

from lockstep.config import MonitorConfig
from lockstep.records import RunDirectory

Row = dict[str, Any]
Event = Callable[..., None]

_log = logging.getLogger("lockstep")


class Sink(Protocol):
    """Where records go. `row` holds plain numbers by the names of `StepRecord`."""

    def on_step(self, row: Row) -> None: ...

    def on_eval(self, row: Row) -> None: ...

    def close(self) -> None: ...


class Written(Sink, Protocol):
    """A sink that may hold rows back for a moment."""

    def flush(self) -> None:
        """Write them."""


class Jsonl:
    """`metrics.jsonl` of the run directory."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run

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

    made: list[Written] = []
    files: list[Guarded] = []
    for name in config.sinks:
        sink: Sink | None = None
        if name == "console":
            from lockstep.monitor.console import Console

            sink = Console(total_steps, start_step)
        elif name == "jsonl":
            sink = Jsonl(run) if run is not None else None
        elif name == "tensorboard":
            from lockstep.monitor.tensorboard import open_tensorboard

            sink = open_tensorboard(run) if run is not None else None
        elif name == "wandb":
            from lockstep.monitor.wandb import open_wandb

            sink = open_wandb(run, config.experiment or "lockstep") if run is not None else None
        elif name == "mlflow":
            from lockstep.monitor.mlflow import open_mlflow

            sink = open_mlflow(run, config.experiment or "lockstep") if run is not None else None
        if sink is None:
            continue
        guarded = Guarded(f"the sink {name}", sink, event)
        if name == "console":
            made.append(guarded)
        elif name in ("wandb", "mlflow"):
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
