"""`Monitor` receives every step's record, reads some, and passes them to sinks and callbacks.

Reading a number on the device makes the host wait, so that it cannot queue the next step. Records
are therefore read on logged steps only: every `log_steps`-th, the first of this process, and the
last.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from lockstep.config import MonitorConfig
from lockstep.machine.environment import rank_facts
from lockstep.machine.output import say
from lockstep.monitor.callbacks import ResourceMonitor, build_callbacks
from lockstep.monitor.exporters import Prometheus
from lockstep.monitor.figures import Figures, StragglerWatch
from lockstep.monitor.media import sorted_values
from lockstep.monitor.meters import Meters, Rates, memory_of_this_rank, without_graph
from lockstep.monitor.profiling import Profiler
from lockstep.monitor.sinks import (
    CAPACITY,
    Background,
    Guarded,
    Row,
    Sink,
    SinkContext,
    sink_named,
    warn_left_out,
)
from lockstep.registry import SINKS, require_methods
from lockstep.run_directory.records import RunDirectory, StepRecord, append_line

_log = logging.getLogger("lockstep")
_MEMORY_SECONDS = 1.0


class Monitor:
    """Logs records; the loop calls `on_step` after every step on every rank, and rank 0 writes.

    `figures` gathers the ranks' measurements; None: nothing is sent. `hosts` are the ranks'
    machines. `callbacks` are objects, beside those that the config names.
    """

    def __init__(
        self,
        config: MonitorConfig,
        run: RunDirectory | None,
        *,
        is_main: bool,
        total_steps: int | None = None,
        start_step: int = 0,
        figures: Figures | None = None,
        hosts: Sequence[str] = (),
        callbacks: Sequence[Any] = (),
    ) -> None:
        self._config = config
        self._run = run
        self._is_main = is_main
        self._total = total_steps
        self._events: deque[dict[str, Any]] = deque(maxlen=CAPACITY)  # that are not written yet
        self._writing_events = threading.Lock()  # the thread that writes a checkpoint tells of it
        self._meters = Meters() if figures is None else Meters(figures.clock.now)
        if figures is not None:
            figures.clock.read(self._meters.since)  # so that both begin at one moment
        self._last: StepRecord | None = None  # the newest record, if it was not logged
        self._seen_one = False
        self._skipped = 0
        self._memory = 0
        self._memory_read = 0.0
        self._figures = figures
        self._hosts = hosts
        self._stragglers = StragglerWatch(config.straggler)
        self._resources = ResourceMonitor(
            config.memory.threshold, config.memory.alert_on_imbalance, self.event
        )
        self._profiler: Profiler | None = None
        if figures is not None and run is not None and config.profile is not None:
            self._profiler = Profiler(
                config.profile, run.path / "profile", rank_facts().rank, self.event
            )
        self._callbacks = [
            Guarded(f"the callback {name}", call, self.event)
            for name, call in build_callbacks(config, None if run is None else run.path, callbacks)
            if is_main or getattr(call, "every_rank", False)
        ]
        self._sinks: list[Guarded | Background] = []
        if is_main:
            self._sinks = self._build_sinks(SinkContext(config, run, total_steps, start_step))
        self._each_step = [sink for sink in self._sinks if sink.each_step]

    def on_step(self, record: StepRecord) -> None:
        """Take one step's record; waits for the device on logged steps only."""
        self._meters.count(record)
        self._skipped += record.skipped
        if self._figures is not None:
            self._figures.count()
        if self.logs(record.step):
            self._log_step(record)
        else:
            self._last = _detached(record)
        for sink in self._each_step:
            sink.send("on_each_step", record)
        self._seen_one = True
        if self._profiler is not None:
            self._profiler.on_step(record.step)

    def logs(self, step: int) -> bool:
        """Return whether this step's record is read: the same answer on every rank."""
        last = self._total is not None and step >= self._total
        return step % self._config.log_steps == 0 or last or not self._seen_one

    def on_eval(self, record: Row) -> None:
        row = {"time": time.time(), **record}
        for sink in self._sinks:
            sink.send("on_eval", row)
        for callback in self._callbacks:
            callback.send("on_eval", row)

    def on_log(self, step: int, values: Mapping[str, Any]) -> list[str]:
        """Log a user's values: numbers, texts, images and histograms.

        The last three are defined in `lockstep.monitor.media`.

        Returns:
            the names of those that no sink takes.
        """
        numbers, media = sorted_values(values)
        if numbers:
            self.on_eval({"step": step, **numbers})
        if media:
            for sink in self._sinks:
                sink.send("on_media", step, media)
        kinds = set[str]().union(*(sink.media_kinds for sink in self._sinks))
        lost = [name for name, value in media.items() if value.kind not in kinds]
        return lost if self._sinks or self._callbacks else [*numbers, *lost]

    def say(self, *lines: str) -> None:
        """Print lines for the person who started the run.

        Rank 0 prints them, once, if there is a console.
        """
        if lines and self._is_main and "console" in self._config.sinks:
            self.flush()
            say(*lines)

    def flush(self) -> None:
        """Write all rows that wait.

        A checkpoint promises that the run up to its step is recorded.
        """
        for sink in self._sinks:
            sink.flush()

    def pause(self) -> None:
        """Write everything, and leave the terminal to others, at the end of a loop.

        Another loop may follow.
        """
        self._log_last()
        for sink in self._sinks:
            sink.send("pause")
        self.flush()

    def go_on_to(self, total_steps: int | None) -> None:
        """Set the number of the run's last step, of another loop."""
        self._total = total_steps
        for sink in self._sinks:
            sink.send("go_on_to", total_steps)

    def event(self, kind: str, **fields: Any) -> None:
        """Write to `events.jsonl`, on rank 0 only.

        A full disk does not stop the run, and events wait for space.
        """
        if self._run is None or not self._is_main:
            return
        self._events.append({"kind": kind, "time": time.time(), **fields})
        try:
            self._write_events()
        except OSError as error:
            _log.warning("warning: the event %r could not be written: %s", kind, error)

    def _write_events(self) -> None:
        with self._writing_events:
            while self._run is not None and self._events:
                append_line(self._run.events, self._events[0])
                self._events.popleft()

    def close(self) -> None:
        """Log the last step if needed, and close the sinks; a second call does nothing."""
        self._log_last()
        for sink in (*self._sinks, *self._callbacks):
            sink.close()
        if self._profiler is not None:
            self._profiler.close()
        self._sinks = []
        self._callbacks = []
        self._each_step = []
        with suppress(OSError):  # it was warned of
            self._write_events()

    def _build_sinks(self, context: SinkContext) -> list[Guarded | Background]:
        """Return the sinks of the config; those whose libraries are missing are left out."""
        config = context.config
        run = context.run
        made: list[Guarded | Background] = []
        files: list[Guarded] = []
        for name in config.sinks:
            kind = sink_named(name)
            if run is None and getattr(kind, "needs_run_directory", False):
                continue
            try:
                sink = kind(context)
            except ImportError as error:
                warn_left_out(name, error)
                continue
            if ":" in name:
                require_methods(
                    sink, Sink, name, SINKS.where, required=("on_step", "on_eval", "close")
                )
            guarded = Guarded(f"the sink {name}", sink, self.event)
            if getattr(kind, "at_once", False):
                made.append(guarded)
            elif getattr(kind, "own_thread", False):
                made.append(Background([guarded], self.event))
            else:
                files.append(guarded)
        if files:
            made.append(Background(files, self.event))
        if config.prometheus is not None:
            try:
                served = Prometheus(
                    config.prometheus, "" if run is None else run.path.resolve().name
                )
            except ImportError as error:
                warn_left_out("prometheus", error)
                return made
            self.event("prometheus", address=served.address)
            self.say(f"metrics for Prometheus at {served.address}")
            made.append(Guarded("the sink prometheus", served, self.event))
        return made

    def _rates(self) -> Rates:
        """Return the rates since the last logged step, without its pauses; waits for the device."""
        if self._figures is not None:
            self._meters.pause(self._figures.clock.take_pauses())
        return self._meters.read()

    def _over_ranks(self, step: int, at: float | None) -> Row:
        """Return this step's figures over ranks, if they are due.

        Every rank calls it on every logged step.

        Args:
            step: the number of the step.
            at: the moment at which this rank's phases are read; None: now.
        """
        figures = self._figures
        if figures is None or not figures.due(step, last=step == self._total):
            return {}
        table = figures.collect(step, at)
        if not self._is_main:
            return {}
        for slow in self._stragglers.look(table):
            host = self._hosts[slow.rank] if self._hosts else None
            text = slow.sentence(host)
            _log.warning("warning: step %d: %s", step, text)
            self.event("straggler", step=step, host=host, text=text, **asdict(slow))
        if self._run is not None:
            with suppress(OSError):  # a full disk does not stop the run
                self._run.write_ranks(table, step)
        return figures.row(table)

    def _log_last(self) -> None:
        """Log the newest step, if it was not logged."""
        if self._last is not None:
            # after a failure of the device its numbers can't be read any more
            with suppress(RuntimeError):
                # peers may be gone: nothing is gathered
                self._log_step(self._last, gathers=False)

    def _log_step(self, record: StepRecord, *, gathers: bool = True) -> None:
        """Read a step's record and the measurements since the last one, and pass them on.

        The meters and the phases are read at one moment: were they read one after the other, time
        that passes in between would count for this row in one, and for the next row in the other.
        """
        self._last = None
        rates = self._rates() if self._sinks or self._callbacks else None
        over_ranks: Row = {}
        if gathers:
            over_ranks = self._over_ranks(
                record.step, None if rates is None else self._meters.since
            )
        if rates is None:
            return
        row = record.as_dict() | over_ranks  # host waits for the device
        if self._skipped:
            row["skipped_steps"] = self._skipped
        row["step_seconds"] = record.step_seconds or rates.step_seconds
        row["samples_per_second"] = record.samples_per_second or rates.samples
        row["tokens_per_second"] = record.tokens_per_second or rates.tokens
        row["targets_per_second"] = record.targets_per_second or rates.targets
        if rates.tokens == 0 or rates.targets <= rates.samples:  # no token ids: classes, images
            for name in ("tokens_per_second", "targets_per_second", "tokens_read"):
                row.pop(name, None)
        if not 0 <= row["time"] - self._memory_read < _MEMORY_SECONDS:  # the system call is slow
            self._memory = memory_of_this_rank().peak
            self._memory_read = row["time"]
        row["memory_bytes"] = record.memory_bytes or self._memory
        for sink in self._sinks:
            sink.send("on_step", row)
        for callback in self._callbacks:
            callback.send("__call__", StepRecord(**row))
        if over_ranks:
            self._resources(StepRecord(**row))


def _detached(record: StepRecord) -> StepRecord:
    """Detach a record that is held until the next one: it must not keep its step's graph alive."""
    if isinstance(record.loss, float):  # on the CPU all numbers are floats
        return record
    numbers = {name: getattr(record, name) for name in ("loss", "grad_norm", "tokens")}
    if all(getattr(value, "grad_fn", None) is None for value in numbers.values()):
        return record
    return replace(record, **{name: without_graph(value) for name, value in numbers.items()})
