"""Logs records to MLflow: one run of the experiment `monitor.experiment`, named like the run directory.

MLflow's variable MLFLOW_TRACKING_URI gives the address; unset, it is `RUN/mlflow`, which needs no server.
"""

import os
from importlib import import_module
from typing import Any

from lockstep.monitor.sinks import Row, SinkContext, scalars

_LONGEST = 500  # characters of a parameter's value


class Mlflow:
    """Logs to an MLflow run, which it creates at the first record."""

    needs_run_directory = True
    own_thread = True

    def __init__(self, context: SinkContext) -> None:
        self._library = import_module("mlflow")
        self._run, self._experiment = context.directory, context.experiment
        self._client: Any = None
        self._id = ""

    def on_step(self, row: Row) -> None:
        """Log a row's numbers."""
        client = self._connected()
        when = int(row["time"] * 1000)
        metric = self._library.entities.Metric
        values = [metric(name, value, when, row["step"]) for name, value in scalars(row).items()]
        client.log_batch(self._id, metrics=values)

    on_eval = on_step

    def close(self) -> None:
        """End the MLflow run."""
        if self._client is not None:
            self._client.set_terminated(self._id)

    def _connected(self) -> Any:
        if self._client is None:
            address = os.environ.get("MLFLOW_TRACKING_URI")
            if address is None:
                # MLflow uses a database by default; files in the run directory need none.
                os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
                address = (self._run.path.resolve() / "mlflow").as_uri()
            client = self._library.MlflowClient(tracking_uri=address)
            known = client.get_experiment_by_name(self._experiment)
            experiment = known.experiment_id if known is not None else client.create_experiment(self._experiment)
            self._id = client.create_run(experiment, run_name=self._run.path.resolve().name).info.run_id
            self._client = client
            self._log_config()
        return self._client

    def _log_config(self) -> None:
        import yaml

        config = yaml.safe_load(self._run.config.read_text()) if self._run.config.exists() else {}
        parameter = self._library.entities.Param
        pairs = [
            (f"{a}.{b}", str(v)[:_LONGEST]) for a, s in config.items() if isinstance(s, dict) for b, v in s.items()
        ]
        self._client.log_batch(self._id, params=[parameter(name, value) for name, value in pairs[:100]])
