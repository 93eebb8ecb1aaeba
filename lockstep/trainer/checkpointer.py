"""Decides when a run is saved, which checkpoints are kept, where it resumes, and where it rolls back to."""

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import checkpoint, collectives
from lockstep.bad_numbers import BadNumbersError
from lockstep.config import CheckpointConfig
from lockstep.errors import RunError, UsageError
from lockstep.heartbeat import called_by_all_ranks
from lockstep.monitor import Monitor
from lockstep.records import RunDirectory, last_lines
from lockstep.trainer.changes import apply_changed_options, compare, moved_schedule

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer


_log = logging.getLogger("lockstep")


class Checkpointer:
    """Saves one run and rolls it back; every rank has one, and calls each method at the same steps."""

    def __init__(self, trainer: "Trainer", monitor: Monitor) -> None:
        self._trainer, self._monitor, self._config = trainer, monitor, trainer.config.checkpoint
        directory = trainer.run_directory
        self._folder = None if self._config.save_strategy == "none" else trainer.checkpoints
        self._saver: checkpoint.AsyncSaver | None = None
        self._evaluated: dict[int, float] = {}
        self._rollbacks: dict[int, int] = {}  # step → rollbacks to it
        self.saved: int | None = None  # step of the last save that was begun
        if self._folder is None:
            return
        # The evaluation at the end of a run comes after its last save, which therefore does not hold the result.
        if trainer.is_main_process and directory is not None:
            self._evaluated = evaluations(directory, self._config.keep_best)
        assert trainer.storage_is_shared or self._config.format == "full"
        self._options = checkpoint.SaveOptions(self._config.format, self._config.retries, self._report_retry)
        if self._config.async_:
            self._saver = checkpoint.AsyncSaver(then=self._committed)

    def after_step(self, *, last: bool, last_of_epoch: bool) -> None:
        """Save if it is due; check the running save."""
        if self._folder is None:
            return
        step = self._trainer.step.progress.step
        by_epoch = self._config.save_strategy == "epoch"
        is_best = self._trainer.state.best_is_new
        if last or is_best or (last_of_epoch if by_epoch else step % self._config.save_steps == 0):
            self.save(must_succeed=last)
        elif self._saver is not None:
            self._guard(self._saver.poll, must_succeed=False)

    @called_by_all_ranks
    def save(self, *, must_succeed: bool) -> None:
        """Save the run now; in the background, unless it must have succeeded when this returns."""
        step = self._trainer.step.progress.step
        if self._folder is None or self.saved == step:
            self.finish(must_succeed=must_succeed)
            return
        started = time.perf_counter()
        with self._trainer.step.clock.during("checkpoint"):
            self._trainer.step.flush()  # host waits for the device: bad numbers must not be saved
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
            _log.warning("warning: step %d waited %.1f s for the save before it to be written", step, waited)

    def finish(self, *, must_succeed: bool) -> None:
        """Wait for the running save: at the end, before a stop, before a rollback."""
        if self._saver is not None:
            self._guard(self._saver.wait, must_succeed=must_succeed)

    def finish_alone(self) -> None:
        """Wait for the running save on this rank, which ends with an error, without asking the others."""
        if self._saver is not None:
            self._trainer.heartbeat.beat(self._trainer.step.progress.step, "pause")
            self._saver.finish_alone()

    def _begin(self, step: int) -> None:
        assert self._folder is not None
        trainer, self.saved = self._trainer, step
        save = checkpoint.save if self._saver is None else self._saver.save
        path = save(self._folder, step, trainer.snapshot(), config_yaml=trainer.config.to_yaml(), options=self._options)
        if self._saver is None and trainer.is_main_process:
            assert path is not None
            self._committed(path)

    def _committed(self, path: checkpoint.CheckpointPath) -> None:
        """Record a commit, and delete old checkpoints; on rank 0, in the background for an asynchronous save."""
        assert self._folder is not None
        self._monitor.event("save", step=checkpoint.step_of(path.name), checkpoint=path.name)
        best = best_of(self._folder, self._config, self._evaluated)
        checkpoint.rotate(self._folder, self._config.save_total_limit, [] if best is None else [best])

    def _guard(self, call: Any, *, must_succeed: bool) -> None:
        try:
            call()
        except RunError as error:
            step = self._trainer.step.progress.step
            self._monitor.event("save_failed", step=step, reason=str(error))
            if must_succeed or self._config.on_failure == "stop":
                raise
            if self._trainer.is_main_process:
                _log.warning("warning: step %d: training goes on without a new checkpoint: %s", step, error)

    def _report_retry(self, error: RunError, seconds: float) -> None:
        self._monitor.event("save_retry", reason=str(error), pause_seconds=seconds)
        _log.warning("warning: a save failed and is tried again in %g s: %s", seconds, error)

    def roll_back(self, error: BadNumbersError) -> None:
        """Go back to the newest checkpoint; the bad step's data will be skipped.

        The error is raised if the config says to stop, there is no checkpoint, or there were too many rollbacks.
        """
        trainer, monitor = self._trainer, self._monitor
        self.finish(must_succeed=False)
        if not error.rolls_back or trainer.checkpoints is None:
            raise error
        trainer.optimizer.zero_grad(set_to_none=True)
        if not checkpoint.list_checkpoints(trainer.checkpoints):
            monitor.say("there is no checkpoint yet to go back to")
            raise error
        found = find(trainer, "auto")
        assert found is not None, "there is one"
        restore(trainer, found)
        step = trainer.step.progress.step
        # The number of rollbacks to a step is limited: else a run could repeat them for ever.
        self._rollbacks = {step: self._rollbacks.get(step, 0) + 1}
        if self._rollbacks[step] > trainer.config.training.bad_numbers.patience:
            raise error
        trainer.step.avoid_data_of(error.anomaly.step)
        self.saved = None
        monitor.event("rollback", step=step, checkpoint=found.name, passed_over=error.anomaly.step)
        monitor.say(f"goes back to step {step}, {found.name}, and passes over the data of step {error.anomaly.step}")


def resume(trainer: "Trainer", how: str) -> tuple[checkpoint.CheckpointPath | None, list[str]]:
    """Bring the run's state, and its run directory, to where it resumes; return lines to log, too."""
    started = time.perf_counter()
    found = find(trainer, how)
    changed = []
    if found is not None:
        changed = compare(trainer.config, trainer.global_batch_size, found, is_main=trainer.is_main_process)
    fresh = [dict(group) for group in trainer.optimizer.param_groups]
    rows = last_lines(trainer.run_directory.metrics, 50) if trainer.run_directory and trainer.is_main_process else []
    come_to = max((row["step"] for row in rows if isinstance(row.get("step"), int)), default=0)
    log_lines = restore(trainer, found)
    if found is None:
        return None, []
    step = trainer.step.progress.step
    if trainer.scales_rate:  # the config's own optimizer; a user's brings its options
        apply_changed_options(trainer.optimizer.param_groups, fresh, changed)
    log_lines.append(f"resumes after step {step}, from {found}")
    if changed:
        log_lines.append(f"changed since that step: {', '.join(map(str, changed))}")
        if trainer.scales_rate and trainer.user_schedule is None:
            rate = trainer.optimizer.param_groups[0].get("initial_lr", trainer.config.training.learning_rate)
            per_epoch = checkpoint.read_state(found).get("steps_per_epoch") if trainer.is_main_process else None
            log_lines += moved_schedule(trainer.config.training, changed, step, rate, per_epoch)
    if come_to > step:
        log_lines.append(f"the run had come to step {come_to}: what follows step {step} is trained again")
    if trainer.run_directory is not None and trainer.is_main_process:
        seconds = time.perf_counter() - started
        trainer.run_directory.append_event("resume", step=step, checkpoint=str(found), seconds=seconds)
    return found, log_lines


def restore(trainer: "Trainer", found: checkpoint.CheckpointPath | None) -> list[str]:
    """Bring the run's state, and its run directory, to a checkpoint, or to the start; every rank calls it.

    Metrics of later steps are dropped, and later checkpoints set aside: they are written again. Returns lines to log.
    """
    step, log_lines = 0, list[str]()
    if found is not None:
        _, log_lines = trainer.state.load(found)
        step = trainer.step.progress.step
    directory = trainer.run_directory
    if directory is not None and trainer.is_main_process:
        directory.drop_after(step)
        for path in checkpoint.set_aside(trainer.checkpoints or directory.checkpoints, after=step):
            directory.append_event("set_aside", step=step, checkpoint=path.name)
    if trainer.layout.world_size > 1:
        collectives.barrier()  # no rank reads the folder before it is in order
    return log_lines


def find(trainer: "Trainer", how: str) -> checkpoint.CheckpointPath | None:
    """Return where to resume: the newest whole checkpoint (`auto`), nowhere (`never`), or the given path.

    A RunError is raised if there are checkpoints, and none is whole: a person has to decide about a fresh start.
    """
    if how == "never":
        return None
    if how == "auto":
        folder = trainer.checkpoints
        if folder is None:
            return None
        if trainer.storage_is_shared:
            return checkpoint.resume_point(folder)
        here = checkpoint.newest(folder, thorough=True) if trainer.is_main_process else None
        return checkpoint.copy_to_hosts(here)
    if isinstance(trainer.checkpoints, checkpoint.Storage) and trainer.checkpoints.exists(how):
        return trainer.checkpoints.path(how)
    path = Path(how)
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if (path / checkpoint.MANIFEST).exists():
        return path
    if path.is_dir() and (found := checkpoint.resume_point(path)) is not None:
        return found
    why = f"there is no {checkpoint.MANIFEST} in it" if path.is_dir() else "there is no such folder"
    fix = "give a folder checkpoints/step-…, a run directory, auto or never"
    raise UsageError(f"{how} is not a checkpoint", where="--resume", why=why, fix=fix)


def evaluations(directory: RunDirectory, metric: str | None) -> dict[int, float]:
    """Return step → a metric of its evaluation, from metrics.jsonl; empty if no evaluation computes it."""
    rows = [row for row in directory.read_metrics() if "loss" not in row] if metric is not None else []
    return {int(row["step"]): float(row[metric]) for row in rows if metric in row}


def best_of(
    folder: checkpoint.Directory, config: CheckpointConfig, later: Mapping[int, float]
) -> checkpoint.CheckpointPath | None:  # fmt: skip
    """Return the best checkpoint by the metric `keep_best`, the newest of equal ones; None if none has the metric.

    `later` has the values, by step, that were measured after the checkpoint was written.
    """
    if config.keep_best is None:
        return None
    known = []
    sign = 1.0 if config.keep_best_mode == "min" else -1.0
    for path in checkpoint.list_checkpoints(folder):
        try:
            metrics = checkpoint.read_state(path).get("metrics", {})
            value = later.get(checkpoint.step_of(path.name) or 0, float(metrics.get(config.keep_best, math.nan)))
        except (RunError, TypeError, ValueError, AttributeError):  # a damaged checkpoint is not a candidate
            continue
        if math.isfinite(value):
            known.append((sign * value, path))
    return min(reversed(known), key=lambda pair: pair[0])[1] if known else None
