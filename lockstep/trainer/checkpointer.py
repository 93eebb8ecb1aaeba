"""Decides when a run is saved, which checkpoints are kept, and where it rolls back to.

Tests: tests/trainer/test_resume.py, tests/trainer/test_ends.py
"""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lockstep import checkpoint
from lockstep.bad_numbers import BadNumbersError
from lockstep.config import CheckpointConfig
from lockstep.errors import RunError
from lockstep.files.paths import local_path
from lockstep.heartbeat.writer import called_by_all_ranks, own_heartbeat
from lockstep.monitor import Monitor
from lockstep.run_directory.records import RunDirectory, read_lines
from lockstep.trainer import saved_state
from lockstep.trainer.memory_copies import MemoryCopies
from lockstep.trainer.resume import clear_later, newest_kept
from lockstep.trainer.run_state import RunState

_log = logging.getLogger("lockstep")


class Checkpointer:
    """Saves one run and rolls it back.

    Every rank has one, and calls each method at the same steps.
    """

    def __init__(self, run: RunState, monitor: Monitor) -> None:
        self._run = run
        self._monitor = monitor
        self._config = run.config.checkpoint
        output = run.output
        self._folder = None if self._config.save_strategy == "none" else output.checkpoints
        self.copies: MemoryCopies | None = None
        if output.memory is not None and self._config.memory_steps is not None:
            self.copies = MemoryCopies(run, output.memory, monitor, self._tolerate)
        self.saves = self._folder is not None or self.copies is not None
        self._saver: checkpoint.AsyncSaver | None = None
        self._evaluated: dict[int, float] = {}
        self._rollbacks: dict[int, int] = {}  # step → rollbacks to it
        self.saved: int | None = None  # step of the last save that was begun
        self._options = checkpoint.SaveOptions(
            self._config.format, self._config.retries, self._report_retry
        )
        if self._folder is None:
            return
        # The evaluation at the end of a run comes after its last save, which therefore does not
        # hold the result.
        if run.is_main_process and output.directory is not None:
            self._evaluated = evaluations(output.directory, self._config.keep_best)
        assert output.is_shared or self._config.format == "full"
        if self._config.async_:
            self._saver = checkpoint.AsyncSaver(then=self._committed)

    @property
    def needs_save(self) -> bool:
        """Return whether the current step is not saved, though the run is."""
        return self._folder is not None and self.saved != self._run.step.progress.step

    def remember_evaluation(self, step: int, results: Mapping[str, Any]) -> None:
        """Keep the metric of an evaluation that was made after its step was saved."""
        name = self._config.keep_best
        if name is not None and name in results and self._run.is_main_process:
            self._evaluated[step] = float(results[name])

    def after_step(self, *, last: bool, last_of_epoch: bool) -> None:
        """Save if it is due; check the running save."""
        if self.copies is not None and not last:
            self.copies.write()
            self.copies.commit()
        if self._folder is None:
            return
        step = self._run.step.progress.step
        by_epoch = self._config.save_strategy == "epoch"
        is_best = self._run.results.best_is_new
        if last or is_best or (last_of_epoch if by_epoch else step % self._config.save_steps == 0):
            self.save(must_succeed=last)
        elif self._saver is not None:
            self._guard(self._saver.poll, must_succeed=False)

    @called_by_all_ranks
    def save(self, *, must_succeed: bool) -> None:
        """Save the run now; in the background, unless it must have succeeded when this returns."""
        step = self._run.step.progress.step
        if self._folder is None or self.saved == step:
            self.finish(must_succeed=must_succeed)
            return
        started = time.perf_counter()
        with self._run.step.clock.during("checkpoint"):
            self._run.step.flush()  # host waits for the device: bad numbers must not be saved
            self._monitor.flush()  # a run that resumes here has the records up to here
            # Only one save runs at a time.
            self.finish(must_succeed=False)
            waited = time.perf_counter() - started
            self._guard(lambda: self._begin(step), must_succeed=must_succeed)
            if must_succeed:
                self.finish(must_succeed=True)
        stall = time.perf_counter() - started
        self._monitor.event("save_stall", step=step, seconds=stall, waited_for_previous=waited)
        if waited > 1 and self._saver is not None:
            _log.warning(
                "warning: step %d waited %.1f s for the save before it to be written", step, waited
            )

    def save_as_asked(self, snapshot: checkpoint.Snapshot) -> checkpoint.CheckpointPath:
        """Save the caller's snapshot of the current step among the run's checkpoints.

        The checkpoint is complete on return.
        """
        folder = self._run.output.checkpoints
        assert folder is not None
        self.finish(must_succeed=False)
        self._monitor.flush()
        step = self._run.step.progress.step
        options = replace(self._options, sets_aside=True)
        path = checkpoint.save(
            folder, step, snapshot, config_yaml=self._run.config.to_yaml(), options=options
        )
        self.saved = step
        if self._run.is_main_process:
            self._committed(path)
        return path

    def finish(self, *, must_succeed: bool) -> None:
        """Wait for the running save: at the end, before a stop, before a rollback."""
        if self._saver is not None:
            self._guard(self._saver.wait, must_succeed=must_succeed)

    def finish_alone(self) -> None:
        """Wait for the running save on this rank, which ends with an error.

        The other ranks are not asked.
        """
        own_heartbeat().beat(self._run.step.progress.step, "pause")
        if self._saver is not None:
            self._saver.finish_alone()

    def _begin(self, step: int) -> None:
        assert self._folder is not None
        self.saved = step
        save = checkpoint.save if self._saver is None else self._saver.save
        contents = saved_state.snapshot(self._run)
        config = self._run.config.to_yaml()
        path = save(self._folder, step, contents, config_yaml=config, options=self._options)
        if self._saver is None and self._run.is_main_process:
            assert path is not None
            self._committed(path)

    def _committed(self, path: checkpoint.CheckpointPath) -> None:
        """Record a commit, and delete old checkpoints.

        It is called on rank 0; for an asynchronous save, in the background. Where those that are
        old can't be read or deleted now, all stay until the next save.
        """
        folder = self._run.output.checkpoints
        assert folder is not None
        self._monitor.event("save", step=checkpoint.step_of(path.name), checkpoint=path.name)
        try:
            best = best_of(folder, self._config, self._evaluated)
            checkpoint.rotate(folder, self._config.save_total_limit, [] if best is None else [best])
        except (OSError, checkpoint.UnreachableError) as error:
            why = error.why if isinstance(error, checkpoint.UnreachableError) else error
            _log.warning("warning: no older checkpoint is deleted now: %s", why)

    def _tolerate(self, call: Any) -> None:
        self._guard(call, must_succeed=False)

    def _guard(self, call: Any, *, must_succeed: bool) -> None:
        """Make a call that saves; an error is recorded, and raised if the run may not go on."""
        try:
            call()
        except RunError as error:
            step = self._run.step.progress.step
            self._monitor.event("save_failed", step=step, reason=str(error))
            if must_succeed or self._config.on_failure == "stop":
                raise
            if self._run.is_main_process:
                _log.warning(
                    "warning: step %d: training goes on without a new checkpoint: %s", step, error
                )

    def _report_retry(self, error: RunError, seconds: float) -> None:
        self._monitor.event("save_retry", reason=str(error), pause_seconds=seconds)
        _log.warning("warning: a save failed and is tried again in %g s: %s", seconds, error)

    def roll_back(self, error: BadNumbersError) -> None:
        """Go back to the newest checkpoint; the bad step's data will be skipped.

        The error is raised if the config says to stop, there is no checkpoint, or there were too
        many rollbacks.
        """
        run = self._run
        monitor = self._monitor
        self.finish(must_succeed=False)
        if not error.rolls_back or run.output.checkpoints is None:
            raise error
        run.step.optimizer.zero_grad(set_to_none=True)
        if not checkpoint.list_checkpoints(run.output.checkpoints):
            monitor.say("there is no checkpoint yet to go back to")
            raise error
        loaded = newest_kept(run.output).load(
            lambda saved, verified: saved_state.load(run, saved, is_verified=verified)
        )
        assert loaded is not None, "there is one"
        earlier, _ = loaded
        clear_later(run)
        step = run.step.progress.step
        # The number of rollbacks to a step is limited: else a run could repeat them for ever.
        self._rollbacks = {step: self._rollbacks.get(step, 0) + 1}
        if self._rollbacks[step] > run.config.training.bad_numbers.patience:
            raise error
        run.step.avoid_data_of(error.anomaly.step)
        self.saved = None
        if self.copies is not None:
            self.copies.go_back()
        monitor.event(
            "rollback", step=step, checkpoint=earlier.name, passed_over=error.anomaly.step
        )
        monitor.say(
            f"goes back to step {step}, {earlier.name}, and passes over the data of step"
            f" {error.anomaly.step}"
        )


def save_elsewhere(
    run: RunState, path: str | Path, snapshot: checkpoint.Snapshot
) -> checkpoint.CheckpointPath:
    """Save the caller's snapshot to a folder that is not the run's own; return the checkpoint."""
    config = run.config.checkpoint
    options = checkpoint.SaveOptions(config.format, config.retries, sets_aside=True)
    folder = local_path(path, "save_checkpoint")
    step = run.step.progress.step
    return checkpoint.save(
        folder, step, snapshot, config_yaml=run.config.to_yaml(), options=options
    )


def best_checkpoint(run: RunState) -> checkpoint.CheckpointPath | None:
    """Return the best checkpoint by `checkpoint.keep_best`, if there is one; all ranks ask."""
    config = run.config.checkpoint
    folder = run.output.checkpoints
    directory = run.output.directory
    if folder is None or directory is None:
        return None
    return checkpoint.Ranks().broadcast(
        "the checkpoints could not be read",
        lambda: best_of(folder, config, evaluations(directory, config.keep_best)),
    )


def evaluations(directory: RunDirectory, metric: str | None) -> dict[int, float]:
    """Return step → a metric of its evaluation, from metrics.jsonl.

    It is empty if no evaluation computes the metric.
    """
    rows = read_lines(directory.metrics) if metric is not None else ()
    return {
        int(row["step"]): float(row[metric]) for row in rows if metric in row and "loss" not in row
    }


def best_of(
    folder: checkpoint.Directory, config: CheckpointConfig, later: Mapping[int, float]
) -> checkpoint.CheckpointPath | None:
    """Return the best checkpoint by the metric `keep_best`, the newest of equal ones.

    None if none has the metric. An UnreachableError is raised if one could not be read.

    `later` has the values, by step, that were measured after the checkpoint was written.
    """
    if config.keep_best is None:
        return None
    known = []
    sign = 1.0 if config.keep_best_mode == "min" else -1.0
    for path in checkpoint.list_checkpoints(folder):
        try:
            metrics = checkpoint.read_state(path).get("metrics", {})
            value = later.get(
                checkpoint.step_of(path.name) or 0, float(metrics.get(config.keep_best, math.nan))
            )
        except (checkpoint.DamagedError, TypeError, ValueError, AttributeError):
            # a damaged checkpoint is not a candidate
            continue
        if math.isfinite(value):
            known.append((sign * value, path))
    return min(reversed(known), key=lambda pair: pair[0])[1] if known else None
