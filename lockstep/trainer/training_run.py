"""Runs the steps of a training in every way to train: records them, saves them, goes back after bad numbers.

`Trainer.train` and `Trainer.steps` are loops over `TrainingRun.steps`; `Trainer.training_step`
hands over each update.

Tests: tests/trainer/test_loops.py, tests/trainer/test_trainer.py, tests/parity/test_law_one.py
"""

import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from shlex import quote
from typing import TYPE_CHECKING, Any

from lockstep.bad_numbers import ALL_IGNORED, Anomaly, BadNumbersError
from lockstep.data import StepSource
from lockstep.errors import RunError, listed
from lockstep.monitor import Monitor
from lockstep.records import StepRecord
from lockstep.trainer import whole_run
from lockstep.trainer.caller_batches import OpenStep
from lockstep.trainer.checkpointer import Checkpointer

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

_log = logging.getLogger("lockstep")

TakenSteps = Iterator[tuple[StepRecord | None, bool]]
"""(record, last of its epoch) of each step; no record if its data are skipped."""


@dataclass
class TakenStep:
    """A step that was taken and recorded, and that is saved, if it is due, when the next one is asked for."""

    record: StepRecord | None  # None: its data were skipped
    is_last: bool  # of the run, as far as it is known
    last_of_epoch: bool


class TrainingRun:
    """A run in progress; every rank has one, and calls its methods at the same steps.

    In loops of the caller's own it stays open from the first step until the process or the trainer
    ends.
    """

    def __init__(
        self,
        trainer: "Trainer",
        monitor: Monitor,
        around_step: whole_run.AroundStep = nullcontext,
        *,
        in_callers_loop: bool = False,
        is_recorded: bool = True,
    ) -> None:
        self.trainer, self.monitor, self.around_step = trainer, monitor, around_step
        self.in_callers_loop, self.is_recorded = in_callers_loop, is_recorded
        self.checkpointer = Checkpointer(trainer, monitor)
        # the caller's loop ended before its data, at a step that is not saved
        self.was_left = False
        self._first = trainer.step.progress.step  # the one after which it begins
        self._evaluated: int | None = None  # the step of the last evaluation that counted
        directory = trainer.run_directory if in_callers_loop else None
        self._ending = _Ending(
            weakref.ref(trainer), monitor, None if directory is None else str(directory.path)
        )
        if in_callers_loop and trainer.is_main_process:
            self._ending.window, self._ending.waits_for = (
                trainer.open_step,
                trainer.state.waits_for_evaluations(),
            )
        self._closing = weakref.finalize(trainer, self._ending)

    def steps(
        self,
        source: StepSource,
        total: int | None,
        reopen: Callable[[], StepSource],
        take: Callable[[StepSource], TakenSteps],
    ) -> Generator[TakenStep]:
        """Yield each step to the run's end, with rollbacks; close the source.

        Args:
            source: the remaining steps.
            total: the number of the run's last step, if it is known.
            reopen: returns the remaining steps anew, after a rollback.
            take: runs the steps of a source.
        """
        trainer, checkpointer = self.trainer, self.checkpointer
        step, following = trainer.step, trainer.state.following
        try:
            while True:
                last, last_of_epoch = True, True
                try:
                    with whole_run.explain_worker_deaths(source):
                        for record, last_of_epoch in () if trainer.was_stopped else take(source):
                            self._record(record, source)
                            last = step.progress.step == total or step.stopping
                            if step.stopping:  # a process that is asked to end has little time
                                checkpointer.after_step(last=True, last_of_epoch=last_of_epoch)
                            yield TakenStep(record, last, last_of_epoch)
                            last = last or step.stopping or following.stopped
                            checkpointer.after_step(last=last, last_of_epoch=last_of_epoch)
                            if last and trainer.was_stopped:
                                break
                    step.flush()
                    if not last:  # the data ended, at an unknown length
                        checkpointer.after_step(last=True, last_of_epoch=True)
                    checkpointer.finish(must_succeed=True)
                    self.note_place()
                    return
                except BadNumbersError as error:
                    self._report(error.anomaly, source)
                    source.close()
                    checkpointer.roll_back(error)
                    source = reopen()
        except GeneratorExit:
            self._leave()
            raise
        except Exception:
            self._ending.has_failed = True
            checkpointer.finish_alone()
            raise
        finally:
            source.close()

    def after_update(self, record: StepRecord) -> None:
        """Record and save an update of `training_step`, whose loop is the caller's."""
        step = self.trainer.step
        self._record(record, None)
        last = step.progress.step == step.total or step.stopping
        self.checkpointer.after_step(last=last, last_of_epoch=False)
        self.note_place()

    def end_loop(self, *, is_last: bool) -> None:
        """Write what the caller's loop has recorded.

        The run stays open, since another loop may follow.
        """
        if is_last:
            self.record_end()
        self.monitor.pause()
        if not self.is_recorded:
            self.close()

    def record_end(self) -> None:
        """Record how the run ended."""
        reason = "preempted" if self.trainer.step.stopping else "done"
        self.monitor.event("stop", step=self.trainer.step.progress.step, reason=reason)
        self._ending.is_recorded = True

    def say(self, *lines: str) -> None:
        """Print lines, on rank 0; also where nothing records the steps, and the console has none of them."""
        if self.is_recorded:
            self.monitor.say(*lines)
        elif self.trainer.is_main_process:
            for line in lines:
                print(f"lockstep: {line}", flush=True)

    @property
    def is_closed(self) -> bool:
        """Return whether the monitor is closed."""
        return not self._closing.alive

    def settle(self) -> None:
        """Save the step after which the caller's loop was left.

        All ranks call it, in their next common call.
        """
        if self.was_left:
            self.was_left = False
            self.checkpointer.save(must_succeed=False)
            self.checkpointer.finish(must_succeed=False)
            self.note_place()

    def close(self) -> None:
        """Close the monitor; the last line of a caller's loop says where the run is.

        A second call does nothing.
        """
        self.note_place()
        self._closing()

    def add_evaluation(self, found: Mapping[str, Any]) -> None:
        """Record an evaluation of the caller's own loop.

        Early stopping, `keep_best` and schedulers act on it.
        """
        trainer, following, step = (
            self.trainer,
            self.trainer.state.following,
            self.trainer.step.progress.step,
        )
        results = {
            f"eval_{name}": value for name, value in found.items() if isinstance(value, int | float)
        }
        trainer.state.require_followed(results)
        if (
            self._evaluated == step
            and trainer.state.acts_on_evaluations
            and trainer.is_main_process
        ):
            _log.warning(
                "warning: two evaluations after step %d count: for one that early_stopping,"
                " keep_best and schedulers should not see, write evaluate(…, counts=False)",
                step,
            )
        was_stopped, self._evaluated, self._ending.waits_for = following.stopped, step, ""
        trainer.state.record_evaluation(results, followed=True)
        self.checkpointer.remember_evaluation(step, results)
        self.monitor.on_eval({"step": step, **results})
        if following.stopped and not was_stopped:
            why = following.why_stopped()
            self.monitor.event("early_stop", step=step, reason=why)
            self.say(why)
        if trainer.state.best_is_new:
            self.checkpointer.save(must_succeed=False)
            self.note_place()

    def _leave(self) -> None:
        """Save the run if the caller's loop was left and this is its only rank.

        Others may not have left it.
        """
        trainer = self.trainer
        if not self.in_callers_loop or sys.is_finalizing():
            self.checkpointer.finish_alone()
            return
        trainer.heartbeat.beat(trainer.step.progress.step, "pause")
        self.was_left = self.checkpointer.needs_save
        if self.was_left and trainer.layout.world_size == 1:
            try:
                self.settle()
            except RunError as error:
                _log.warning(
                    "warning: the loop was left, and its last step was not saved: %s", error
                )
        else:
            self.checkpointer.finish_alone()
        self.note_place()
        self.monitor.pause()

    def note_place(self) -> None:
        """Note where the run is, for the line that it ends with."""
        step = self.trainer.step.progress.step
        self._ending.step = step if step > self._first else 0
        self._ending.is_saved = step == self._first or not self.checkpointer.needs_save

    def _record(self, record: StepRecord | None, source: StepSource | None) -> None:
        trainer, monitor = self.trainer, self.monitor
        if trainer.lock is not None:
            trainer.lock.check()
        if record is not None:
            monitor.counts_tokens = trainer.step.reads_tokens
            monitor.on_step(record)
            if trainer.placed.later_log_lines:
                self.say(*trainer.placed.take_log_lines())
            trainer.state.record_step(record)
            if record.recomputed:
                monitor.event("recomputed", step=record.step, what=record.recomputed)
                self.say(f"warning: {record.recomputed}")
        if trainer.step.anomaly is not None:
            self._report(trainer.step.anomaly, source)

    def report_and_finish(self, error: BadNumbersError) -> None:
        """Record the bad numbers that end a loop of `training_step`, and wait for a running save."""
        self._ending.has_failed = True
        self._report(error.anomaly, None)
        self.checkpointer.finish_alone()

    def _report(self, anomaly: Anomaly, source: StepSource | None) -> None:
        """Report an anomaly and its samples: dataset indices by micro-batch, if the data have any."""
        window = _window_of(anomaly, source)
        self.monitor.event(
            "bad_numbers",
            step=anomaly.step,
            what=anomaly.what,
            loss=anomaly.loss,
            grad_norm=anomaly.grad_norm,
            action=self.trainer.config.training.bad_numbers.action,
            samples=window and window.micro_batches,
            epoch=window.epoch if window else self.trainer.step.progress.epoch,
        )
        text = without_targets(anomaly, source) if anomaly.no_targets else anomaly.what
        if self.is_recorded:
            self.monitor.say(f"warning: {text}")
        elif self.trainer.is_main_process:
            warnings.warn(text, stacklevel=6)


def without_targets(anomaly: Anomaly, source: StepSource | None) -> str:
    """Return a sentence on a step without a valid target that names its samples, if the data number them."""
    window = _window_of(anomaly, source)
    samples = [str(index) for batch in window.micro_batches for index in batch] if window else []
    which = f", which are number {listed(samples, 16)} of the data" if samples else ""
    return f"{anomaly.what}{which}: it makes no update ({ALL_IGNORED})"


def _window_of(anomaly: Anomaly, source: StepSource | None) -> Any:
    """Return the samples of an anomaly's step, by micro-batch.

    None if the data do not number them.
    """
    order = getattr(source, "order", None)
    return order.window(anomaly.step - 1) if order is not None else None


@dataclass
class _Ending:
    """Closes a run when its trainer or the process ends.

    It refers weakly to the trainer, not to keep it alive.
    """

    trainer: "weakref.ref[Trainer]"
    monitor: Monitor
    path: str | None  # the run directory of a caller's loop
    step: int = 0  # the last one; 0: none was taken
    is_saved: bool = True
    is_recorded: bool = False  # the event of its end is written
    has_failed: bool = False  # an error of the training ended it
    window: OpenStep = field(default_factory=OpenStep)  # of `training_step`
    waits_for: str = ""  # settings that wait for a first evaluation of the loop

    def __call__(self) -> None:
        """Save the last step where this is the only rank, close the monitor, and say where the run is."""
        # an exception ended the script
        failed = self.has_failed or getattr(sys, "last_value", None) is not None
        trainer = self.trainer()
        if trainer is not None and trainer.current_run is not None:
            trainer.current_run.note_place()
        saves = self.path is not None and not self.is_saved and not failed
        if not failed:
            self._warn_of_what_was_not_done(is_saved_now=saves)
        if saves and trainer is not None and trainer.layout.world_size == 1:
            try:
                trainer.save_checkpoint()
                self.is_saved = True
            except RunError as error:
                _log.warning("warning: step %d could not be saved: %s", self.step, error)
        if self.path is not None and not self.is_recorded and not failed:
            self.monitor.event("stop", step=self.step, reason="done")
        self.monitor.close()
        if self.path is None or self.step == 0 or self.has_failed:
            return
        if not self.is_saved:
            fix = "all ranks call trainer.save_checkpoint() after the loop"
            self.monitor.say(
                f"warning: step {self.step} is the last one, and it is not saved: {fix}"
            )
        elif not failed:
            self.monitor.say(
                f"done after step {self.step} in {self.path}; `lockstep report"
                f" {quote(str(self.path))}` draws it"
            )

    def _warn_of_what_was_not_done(self, *, is_saved_now: bool) -> None:
        """Warn of micro-batches without an update, as a save does, and of settings that no evaluation has reached."""
        if (waiting := self.window.sentence()) and not is_saved_now:
            _log.warning(
                "warning: %s, which the end of the loop drops: call trainer.flush() after it",
                waiting,
            )
        if self.waits_for and self.step:
            fix = "call trainer.evaluate(val_data) in it"
            _log.warning(
                "warning: %s did nothing: the loop made no evaluation that counts; %s",
                self.waits_for,
                fix,
            )
            self.waits_for = ""
