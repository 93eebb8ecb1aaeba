"""Writes records as TensorBoard scalars with their own names: loss, grad_norm, lr, eval_loss and so on.

Each record is one event, appended by one write: one event per scalar costs ten times as much, and TensorBoard's own
writer fails in a thread of its own, where no one can handle the error.
"""

import io
import os
import socket
import time
from importlib import import_module
from typing import Any

from lockstep.monitor.sinks import Row, SinkContext, scalars
from lockstep.records import append_whole


class TensorBoard:
    """Writes scalars to `RUN/tensorboard`."""

    needs_run_directory = True

    def __init__(self, context: SinkContext) -> None:
        run = context.directory
        events = import_module("tensorboard.compat.proto.event_pb2")
        self._event, self._summary = events.Event, import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._as_record = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        now = time.time()
        self._path = run.tensorboard / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.{id(self)}"
        run.tensorboard.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        self._append(self._event(wall_time=now, file_version="brain.Event:2"))

    def on_step(self, row: Row) -> None:
        """Write a row's numbers."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars(row).items()]
        when = row.get("time") or time.time()
        self._append(self._event(step=row["step"], wall_time=when, summary=self._summary(value=values)))

    on_eval = on_step

    def close(self) -> None:
        """Do nothing: every event is written already."""

    def _append(self, event: Any) -> None:
        buffer = io.BytesIO()
        self._as_record(buffer).write(event.SerializeToString())
        append_whole(self._path, buffer.getvalue())  # half an event would hide all later ones
