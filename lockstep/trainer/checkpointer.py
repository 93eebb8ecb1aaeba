"""When a run is saved, what is kept, from where it is resumed, and to where it goes back."""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep import checkpoint, collectives
from lockstep.bad_numbers import Anomaly, BadNumbersError
from lockstep.data import StepSource
from lockstep.errors import RunError, UsageError
from lockstep.heartbeat import together
from lockstep.monitor import Monitor
from lockstep.records import RunDirectory
from lockstep.trainer.run_state import Loaded, compare, keep_what_was_changed

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

METRICS = ("eval_loss", "loss", "grad_norm")  # what `checkpoint.keep_best` may name; the least is the best

_log = logging.getLogger("lockstep")


class Checkpointer:
    """Saves one run; every rank has one, and calls each method at the same steps.

    Args:
        trainer: whose state is saved; it is only read.
        monitor: is told what was saved, how long training stood still for it, and what failed.

    Raises:
        UsageError: the hosts do not share the run directory and the format needs it, or `keep_best` names no metric.
    """

    def __init__(self, trainer: "Trainer", monitor: Monitor) -> None:
        self._trainer, self._monitor, self._config = trainer, monitor, trainer.config.checkpoint
        directory = trainer.run_directory
        self._folder = None if self._config.save_strategy == "none" else trainer.checkpoints
        self._saver: checkpoint.AsyncSaver | None = None
        self._evaluated: dict[int, float] = {}
        self._saved: int | None = None  # the last step of which a save was begun
        if self._folder is None:
            return
        if self._config.keep_best not in (None, *METRICS):
            raise UsageError(
                f"there is no metric {self._config.keep_best}",
                where="checkpoint.keep_best",
                fix=f"one of {', '.join(METRICS)}",
            )
        # The evaluation at the end of a run comes after its last save, which therefore does not hold the result.
        if self._config.keep_best == "eval_loss" and trainer.is_main_process and directory is not None:
            self._evaluated = evaluations(directory)
        assert trainer.storage_is_shared or self._config.format == "full"
        self._options = checkpoint.SaveOptions(self._config.format, self._config.retries, self._report_retry)
        if self._config.async_:
            self._saver = checkpoint.AsyncSaver(then=self._committed)

    # ---- what the loop calls ----

    def after_step(self, *, last: bool, last_of_epoch: bool) -> None:
        """Save if it is time; see what became of the save that is under way.

        Raises:
            RunError: the storage refused, and the config says to stop, or the run ends here.
        """
        if self._folder is None:
            return
        step = self._trainer.step.progress.step
        by_epoch = self._config.save_strategy == "epoch"
        if last or (last_of_epoch if by_epoch else step % self._config.save_steps == 0):
            self.save(must_succeed=last)
        elif self._saver is not None:
            self._guard(self._saver.poll, must_succeed=False)

    @together
    def save(self, *, must_succeed: bool) -> None:
        """Save the run as it stands; in the background, if it need not have succeeded when this returns."""
        step = self._trainer.step.progress.step
        if self._folder is None or self._saved == step:
            self.finish(must_succeed=must_succeed)
            return
        started = time.perf_counter()
        with self._trainer.step.clock.during("checkpoint"):
            self._trainer.step.flush()  # host waits for the device: what is saved must hold no bad numbers
            self._monitor.flush()  # a run that goes on from here finds its records up to here
            # The one before is waited for: one at a time is under way.
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
        """Wait for the save that is under way: at the end, before a stop, before the run goes back."""
        if self._saver is not None:
            self._guard(self._saver.wait, must_succeed=must_succeed)

    def finish_alone(self) -> None:
        """Wait for the save that is under way on this rank, which ends for an error; the others are not asked."""
        if self._saver is not None:
            self._trainer.heartbeat.beat(self._trainer.step.progress.step, "pause")
            self._saver.finish_alone()

    def went_back(self) -> None:
        """The run stands at an earlier step: later ones will be saved anew."""
        self._saved = None

    # ---- how ----

    def _begin(self, step: int) -> None:
        assert self._folder is not None
        trainer, self._saved = self._trainer, step
        snapshot = trainer.snapshot()
        config = trainer.config.to_yaml()
        if self._saver is not None:
            self._saver.save(self._folder, step, snapshot, config_yaml=config, options=self._options)
            return
        path = checkpoint.save(self._folder, step, snapshot, config_yaml=config, options=self._options)
        if trainer.is_main_process:
            self._committed(path)

    def _committed(self, path: checkpoint.CheckpointPath) -> None:
        """Record a commit, and delete what is no longer kept; on rank 0, in the background where the save was."""
        assert self._folder is not None
        self._monitor.event("save", step=checkpoint.step_of(path.name), checkpoint=path.name)
        best = self._config.keep_best
        protected = [] if best is None else best_of(self._folder, best, self._evaluated)
        checkpoint.rotate(self._folder, self._config.save_total_limit, protected)

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


class Rollback:
    """Reports anomalies and takes a run back; every rank has one, and calls each method at the same steps.

    Args:
        trainer: whose run goes back.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self._times: dict[int, int] = {}  # step → rollbacks to it

    def report(self, monitor: Monitor, source: StepSource, anomaly: Anomaly) -> None:
        """Report an anomaly and its samples: dataset indices by micro-batch, where the data have any."""
        order = getattr(source, "order", None)
        window = order.window(anomaly.step - 1) if order is not None else None
        monitor.event(
            "bad_numbers", step=anomaly.step, what=anomaly.what, loss=anomaly.loss, grad_norm=anomaly.grad_norm,
            action=self._trainer.config.training.bad_numbers.action, samples=window and window.micro_batches,
            epoch=window.epoch if window else self._trainer.step.progress.epoch,
        )  # fmt: skip
        monitor.say(f"warning: {anomaly.what}")

    def go_back(self, error: BadNumbersError, monitor: Monitor, checkpointer: Checkpointer) -> None:
        """Go back to the newest checkpoint, from where the bad step's data will be passed over.

        Raises:
            BadNumbersError: the config says to stop, there is nothing to go back to, or it has been done too often.
        """
        trainer = self._trainer
        checkpointer.finish(must_succeed=False)
        if not error.goes_back or trainer.checkpoints is None:
            raise error
        trainer.optimizer.zero_grad(set_to_none=True)
        if not checkpoint.list_checkpoints(trainer.checkpoints):
            monitor.say("there is no checkpoint yet to go back to")
            raise error
        found = find(trainer, "auto")
        loaded = go_to(trainer, found)
        assert found is not None and loaded is not None, "there is one"  # noqa: PT018
        step = loaded.step
        # Each step is gone back to so often at most: else a run could go round for ever.
        self._times = {step: self._times.get(step, 0) + 1}
        if self._times[step] > trainer.config.training.bad_numbers.patience:
            raise error
        trainer.step.avoid_data_of(error.anomaly.step)
        checkpointer.went_back()
        monitor.event("rollback", step=step, checkpoint=found.name, passed_over=error.anomaly.step)
        monitor.say(f"goes back to step {step}, {found.name}, and passes over the data of step {error.anomaly.step}")


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on from.

    Attributes:
        checkpoint: None for a fresh start.
        log_lines: what is to be logged about it.
    """

    checkpoint: checkpoint.CheckpointPath | None
    log_lines: list[str]


def resume(trainer: "Trainer", how: str) -> Resumed:
    """Take the run's state, and its run directory, to where it goes on; all ranks call it. See `Trainer.resume`."""
    started = time.perf_counter()
    found = find(trainer, how)
    changed = []
    if found is not None:
        changed = compare(trainer.config, trainer.global_batch_size, found, is_main=trainer.is_main_process)
    fresh = [dict(group) for group in trainer.optimizer.param_groups]
    loaded = go_to(trainer, found)
    if found is None or loaded is None:
        return Resumed(None, [])
    if trainer.scales_rate:  # the config's own optimizer; a user's brings its options
        keep_what_was_changed(trainer.optimizer.param_groups, fresh, changed)
    log_lines = [*loaded.log_lines, f"goes on after step {loaded.step}, from {found}"]
    if changed:
        log_lines.append(f"changed since that step: {', '.join(map(str, changed))}")
    if trainer.run_directory is not None and trainer.is_main_process:
        seconds = time.perf_counter() - started
        trainer.run_directory.append_event("resume", step=loaded.step, checkpoint=str(found), seconds=seconds)
    return Resumed(found, log_lines)


def go_to(trainer: "Trainer", found: checkpoint.CheckpointPath | None) -> Loaded | None:
    """Take the run's state, and its run directory, to a checkpoint, or to the start; every rank calls it.

    Metrics of later steps are dropped, and later checkpoints set aside: these steps will be written anew.
    """
    loaded = trainer.state.load(found) if found is not None else None
    step = loaded.step if loaded is not None else 0
    directory = trainer.run_directory
    if directory is not None and trainer.is_main_process:
        directory.forget_after(step)
        for path in checkpoint.set_aside(trainer.checkpoints or directory.checkpoints, after=step):
            directory.append_event("set_aside", step=step, checkpoint=path.name)
    if trainer.layout.world_size > 1:
        collectives.barrier()  # nobody looks into the folder before it is in order
    return loaded


def find(trainer: "Trainer", how: str) -> checkpoint.CheckpointPath | None:
    """Return where to resume from: the newest whole checkpoint (`auto`), nowhere (`never`), or the path that is given.

    Raises:
        UsageError: the path is no checkpoint.
        RunError: there are checkpoints, and none is whole: starting afresh is for a person to decide.
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
    return _named(Path(how), how)


def checkpoints_of(trainer: "Trainer") -> checkpoint.Directory | None:
    """Return where a run keeps its checkpoints: in its run directory, or in the storage that its config names."""
    directory, storage = trainer.run_directory, trainer.config.checkpoint.storage
    if directory is None:
        return None
    return directory.checkpoints if storage is None else checkpoint.build_storage(storage)


def storage_is_shared(trainer: "Trainer") -> bool:
    """Return whether all ranks see one folder of checkpoints; all ranks call it together.

    Raises:
        UsageError: they do not, and the format of checkpoints needs it.
    """
    folder, config = trainer.checkpoints, trainer.config.checkpoint
    if trainer.layout.world_size == 1 or folder is None or config.save_strategy == "none":
        return True
    shared = checkpoint.is_shared(folder)
    if not shared and config.format != "full":
        raise UsageError(
            f"the hosts do not share {folder}",
            where="checkpoint.format: " + config.format,
            why="each rank writes its part of a checkpoint, and they belong into one folder",
            fix="choose an --output-dir that all hosts mount, or checkpoint.format: full, which rank 0 writes",
        )
    return shared


def evaluations(directory: RunDirectory) -> dict[int, float]:
    """Step → the loss of its evaluation, as far as metrics.jsonl knows."""
    return {int(row["step"]): float(row["eval_loss"]) for row in directory.read_metrics() if "eval_loss" in row}


def best_of(
    folder: checkpoint.Directory, metric: str, later: Mapping[int, float]
) -> list[checkpoint.CheckpointPath]:  # fmt: skip
    """Return the checkpoint whose metric is least, of those that know it; the newest of equals. Empty if there is none.

    Args:
        later: step → value, where it was measured after the checkpoint was written.
    """
    known = []
    for path in checkpoint.list_checkpoints(folder):
        try:
            metrics = checkpoint.read_state(path).get("metrics", {})
            value = later.get(checkpoint.step_of(path.name) or 0, float(metrics.get(metric, math.nan)))
        except (RunError, TypeError, ValueError, AttributeError):  # a damaged one is no candidate, and is kept anyway
            continue
        if math.isfinite(value):
            known.append((value, path))
    return [min(reversed(known), key=lambda pair: pair[0])[1]] if known else []


def _named(path: Path, how: str) -> checkpoint.CheckpointPath:
    if (path / "checkpoints").is_dir():
        path = path / "checkpoints"
    if path.is_dir() and not (path / checkpoint.MANIFEST).exists():
        found = checkpoint.resume_point(path)
        if found is not None:
            return found
    if not (path / checkpoint.MANIFEST).exists():
        raise UsageError(
            f"{how} is no checkpoint",
            where="--resume",
            why=f"there is no {checkpoint.MANIFEST} in it" if path.is_dir() else "there is no such folder",
            fix="give a folder checkpoints/step-…, a run directory, auto or never",
        )
    return path
