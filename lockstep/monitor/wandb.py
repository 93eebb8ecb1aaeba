"""Logs records to Weights & Biases: one run of the project `monitor.experiment`, named like the run directory.

W&B's own variables apply: WANDB_MODE=offline writes to `RUN/wandb` only, WANDB_API_KEY signs in. A restarted run
continues the same W&B run, whose id is derived from the run directory.
"""

import hashlib
from importlib import import_module
from typing import Any

from lockstep.monitor.sinks import Row, SinkContext, scalars
from lockstep.records import RunDirectory


class WeightsAndBiases:
    """Logs to a W&B run, which it opens at the first record."""

    needs_run_directory = True
    own_thread = True

    def __init__(self, context: SinkContext) -> None:
        self._library = import_module("wandb")
        self._run, self._experiment = context.directory, context.experiment
        self._open: Any = None

    def on_step(self, row: Row) -> None:
        """Log a row's numbers."""
        self._started().log(scalars(row), step=row["step"])

    on_eval = on_step

    def close(self) -> None:
        """End the W&B run."""
        if self._open is not None:
            self._open.finish()

    def _started(self) -> Any:
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
