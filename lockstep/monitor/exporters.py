"""Sends records to TensorBoard, Weights & Biases, MLflow and Prometheus.

Each loads its library when it is made.

Tests: tests/monitor/test_sinks.py, tests/monitor/test_log.py
"""

import hashlib
import html
import io
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.config import PrometheusConfig
from lockstep.errors import UsageError
from lockstep.monitor.media import Media, file_name
from lockstep.monitor.sinks import Row, SinkContext, scalars
from lockstep.run_directory.records import RunDirectory, append_at_once


class TensorBoard:
    """Writes each record to `RUN/tensorboard` as one event, by one write.

    An event for each scalar would cost ten times as much. TensorBoard's own writer fails in a
    thread of its own, where no one can handle the error.
    """

    needs_run_directory = True

    def __init__(self, context: SinkContext) -> None:
        run = context.directory
        events = import_module("tensorboard.compat.proto.event_pb2")
        self._event = events.Event
        self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
        self._as_record = import_module("tensorboard.summary.writer.record_writer").RecordWriter
        now = time.time()
        self._path = (
            run.tensorboard
            / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}.{os.getpid()}.{id(self)}"
        )
        run.tensorboard.mkdir(parents=True, exist_ok=True)
        self._path.touch()
        self._append(self._event(wall_time=now, file_version="brain.Event:2"))
        self._session = import_module("tensorboard.compat.proto.event_pb2").SessionLog
        self._start_step = context.start_step
        self._newest: int | None = None  # the step that was written last

    def on_step(self, row: Row) -> None:
        if self._newest is None or row["step"] <= self._newest:  # resumed, or rolled back
            self._hide_points_from(
                self._start_step + 1 if self._newest is None and self._start_step else row["step"]
            )
        self._newest = row["step"]
        self.on_eval(row)

    def on_eval(self, row: Row) -> None:
        values = [
            self._summary.Value(tag=name, simple_value=value)
            for name, value in scalars(row).items()
        ]
        when = row.get("time") or time.time()
        self._append(
            self._event(step=row["step"], wall_time=when, summary=self._summary(value=values))
        )

    def _hide_points_from(self, step: int) -> None:
        """Have TensorBoard leave out what was written for this step and later ones.

        These steps are taken once more.
        """
        start = self._session(status=self._session.START)
        self._append(self._event(step=step, wall_time=time.time(), session_log=start))

    def on_media(self, step: int, media: Mapping[str, Media]) -> None:
        """Write images, histograms and texts as TensorBoard's protocol has them."""
        values = []
        for name, medium in media.items():
            value = self._summary.Value(tag=name)
            if medium.kind == "image":
                value.image.encoded_image_string = medium.png
                value.image.width, value.image.height = medium.size
            elif medium.kind == "histogram":
                value.histo.bucket_limit.extend(medium.edges[1:])
                value.histo.bucket.extend(medium.counts)
                value.histo.min = medium.edges[0]
                value.histo.max = medium.edges[-1]
                value.histo.num = sum(medium.counts)
            else:
                value.metadata.plugin_data.plugin_name = "text"
                value.tensor.dtype = 7  # DT_STRING of tensorflow's types.proto
                value.tensor.string_val.append(medium.text.encode())
                value.tensor.tensor_shape.dim.add(size=1)
            values.append(value)
        self._append(
            self._event(step=step, wall_time=time.time(), summary=self._summary(value=values))
        )

    def close(self) -> None:
        """Do nothing: every event is written already."""

    def _append(self, event: Any) -> None:
        buffer = io.BytesIO()
        self._as_record(buffer).write(event.SerializeToString())
        append_at_once(self._path, buffer.getvalue())  # half an event would hide all later ones


class WeightsAndBiases:
    """Logs to a W&B run, which it opens at the first record, and which a restarted run continues.

    W&B's own variables apply: WANDB_MODE=offline writes to `RUN/wandb` only, WANDB_API_KEY signs
    in.
    """

    needs_run_directory = True
    own_thread = True

    def __init__(self, context: SinkContext) -> None:
        self._library = import_module("wandb")
        self._run = context.directory
        self._experiment = context.experiment
        self._open: Any = None

    def on_step(self, row: Row) -> None:
        self._started().log(scalars(row), step=row["step"])

    on_eval = on_step

    def on_media(self, step: int, media: Mapping[str, Media]) -> None:
        self._started().log(
            {name: self._media(medium) for name, medium in media.items()}, step=step
        )

    def _media(self, medium: Media) -> Any:
        if medium.kind == "text":
            return self._library.Html(f"<pre>{html.escape(medium.text)}</pre>")
        if medium.kind == "histogram":
            return self._library.Histogram(np_histogram=(list(medium.counts), list(medium.edges)))
        path = self._run.path / "wandb" / "media"
        path.mkdir(parents=True, exist_ok=True)
        file = path / f"{hashlib.sha256(medium.png).hexdigest()[:16]}.png"
        file.write_bytes(medium.png)
        return self._library.Image(str(file))

    def close(self) -> None:
        if self._open is not None:
            self._open.finish()

    def _started(self) -> Any:
        """Return the run in the library, which is opened with its first row."""
        if self._open is None:
            path = self._run.path.resolve()
            self._open = self._library.init(
                project=self._experiment,
                name=path.name,
                id=hashlib.sha256(str(path).encode()).hexdigest()[:16],
                resume="allow",
                dir=str(path),
                config=_config(self._run),
                settings=self._library.Settings(silent=True, init_timeout=30),
            )
        return self._open


def _config(run: RunDirectory) -> Any:
    import yaml

    return yaml.safe_load(run.config.read_text()) if run.config.exists() else {}


class Mlflow:
    """Logs to an MLflow run, which it creates at the first record.

    The run is at MLFLOW_TRACKING_URI, or else in `RUN/mlflow`.
    """

    needs_run_directory = True
    own_thread = True

    def __init__(self, context: SinkContext) -> None:
        self._library = import_module("mlflow")
        self._run = context.directory
        self._experiment = context.experiment
        self._client: Any = None
        self._id = ""

    def on_step(self, row: Row) -> None:
        client = self._connected()
        when = int(row["time"] * 1000)
        metric = self._library.entities.Metric
        values = [metric(name, value, when, row["step"]) for name, value in scalars(row).items()]
        client.log_batch(self._id, metrics=values)

    on_eval = on_step

    def on_media(self, step: int, media: Mapping[str, Media]) -> None:
        """Store texts, images and histograms as artifacts `media/NAME-STEP`."""
        client = self._connected()
        for name, medium in media.items():
            path = f"media/{file_name(name, step)}"
            if medium.kind == "text":
                client.log_text(self._id, medium.text, f"{path}.txt")
            elif medium.kind == "histogram":
                client.log_dict(
                    self._id, {"counts": medium.counts, "edges": medium.edges}, f"{path}.json"
                )
            else:
                with tempfile.TemporaryDirectory() as folder:
                    file = Path(folder, path).with_suffix(".png")
                    file.parent.mkdir()
                    file.write_bytes(medium.png)
                    client.log_artifact(self._id, str(file), "media")

    def close(self) -> None:
        if self._client is not None:
            self._client.set_terminated(self._id)

    def _connected(self) -> Any:
        """Return the client, connected to the experiment at its first use."""
        if self._client is None:
            address = os.environ.get("MLFLOW_TRACKING_URI")
            if address is None:
                # MLflow uses a database by default; files in the run directory need none.
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
                address = (self._run.path.resolve() / "mlflow").as_uri()
            client = self._library.MlflowClient(tracking_uri=address)
            known = client.get_experiment_by_name(self._experiment)
            experiment = (
                known.experiment_id
                if known is not None
                else client.create_experiment(self._experiment)
            )
            self._id = client.create_run(
                experiment, run_name=self._run.path.resolve().name
            ).info.run_id
            self._client = client
            parameters = [
                self._library.entities.Param(f"{section}.{key}", str(value)[:500])
                for section, keys in _config(self._run).items()
                if isinstance(keys, dict)
                for key, value in keys.items()
            ]
            client.log_batch(self._id, params=parameters[:100])
        return self._client


class Prometheus:
    """Serves the newest record until it is closed; raises a UsageError if the port is in use."""

    def __init__(self, config: PrometheusConfig, run_name: str) -> None:
        self._library = import_module("prometheus_client")
        self._run_name = run_name
        self._registry = self._library.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            server = self._library.start_http_server(config.port, config.host, self._registry)
        except OSError as error:
            what = f"Prometheus can't be served at {config.host}:{config.port}: {error.strerror}"
            fix = "choose another port; 0 takes any free one"
            raise UsageError(what, where="monitor.prometheus", fix=fix) from None
        self._server, self._thread = server
        self.address = f"http://{config.host}:{self._server.server_address[1]}/metrics"

    def on_step(self, row: Row) -> None:
        """Set a gauge for each number; phases, kinds of memory and layers become labels."""
        self._set("step", float(row["step"]), {})
        for name, value in scalars(row).items():
            first, _, rest = name.partition("/")
            labelled = {
                "phases": ("phase_seconds", "phase"),
                "memory": ("memory_held_bytes", "kind"),
                "gradient_norms": ("gradient_norm", "layer"),
            }.get(first)
            if labelled is None:
                self._set(name, value, {})
            elif rest.endswith(".most"):
                self._set(f"{labelled[0]}_most", value, {labelled[1]: rest.removesuffix(".most")})
            else:
                self._set(labelled[0], value, {labelled[1]: rest})

    on_eval = on_step

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def _set(self, name: str, value: float, labels: dict[str, str]) -> None:
        full = "lockstep_" + re.sub(r"\W", "_", name)
        gauge = self._gauges.get(full)
        if gauge is None:
            about = f"{name} of the newest record"
            gauge = self._library.Gauge(full, about, ["run", *labels], registry=self._registry)
            self._gauges[full] = gauge
        gauge.labels(run=self._run_name, **labels).set(value)
