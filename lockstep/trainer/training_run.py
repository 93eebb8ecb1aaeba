"""Runs the steps of a training in every way to train.

It records them, saves them, and goes back after bad numbers.

`Trainer.train` and `Trainer.steps` are loops over `TrainingRun.steps`; `Trainer.training_step`
hands over each update.

Tests: tests/trainer/test_loops.py, tests/trainer/test_trainer.py, tests/parity/test_law_one.py
"""

import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from lockstep.bad_numbers import ALL_IGNORED, Anomaly, BadNumbersError
from lockstep.data import StepBatches, StepLoader, StepSource
from lockstep.errors import RunError, listed
from lockstep.heartbeat.writer import own_heartbeat
from lockstep.monitor import Monitor
from lockstep.monitor.meters import waits_counted
from lockstep.records import StepRecord
from lockstep.trainer.caller_batches import OpenStep
from lockstep.trainer.checkpointer import Checkpointer
from lockstep.trainer.run_end import RunEnd
from lockstep.trainer.run_monitor import AroundStep
from lockstep.trainer.run_state import RunState

_log = logging.getLogger("lockstep")


@dataclass
class TakenStep:
    """A step that was taken and recorded.

    It is saved, if it is due, when the next one is asked for.
    """

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
        run: RunState,
        monitor: Monitor,
        around_step: AroundStep = nullcontext,
        *,
        in_callers_loop: bool = False,
        is_recorded: bool = True,
        open_step: OpenStep | None = None,
    ) -> None:
        self._run = run
        self.monitor = monitor
        self._around_step = around_step
        self.in_callers_loop = in_callers_loop
        self.is_recorded = is_recorded
        self.checkpointer = Checkpointer(run, monitor)
        # the caller's loop ended before its data, at a step that is not saved
        self._was_left = False
        self._evaluated: int | None = None  # the step of the last evaluation that counted
        directory = run.output.directory if in_callers_loop else None
        self._end = RunEnd(
            run,
            monitor,
            self.checkpointer,
            first=run.step.progress.step,
            path=None if directory is None else str(directory.path),
            open_step=open_step or OpenStep(),
            waits_for=(
                run.results.waits_for_evaluations()
                if in_callers_loop and run.is_main_process
                else ""
            ),
        )
        self._closing = weakref.finalize(self, self._end)

    def steps(
        self, source: StepSource, total: int | None, reopen: Callable[[], StepSource], name: str
    ) -> Generator[TakenStep]:
        """Yield each step to the run's end, with rollbacks; close the source.

        Args:
            source: the remaining steps.
            total: the number of the run's last step, if it is known.
            reopen: returns the remaining steps anew, after a rollback.
            name: of the function as whose call each step counts, which all ranks make together.
        """
        try:
            while True:
                try:
                    yield from self._steps_of(source, total, name)
                    return
                except BadNumbersError as error:
                    self._report(error.anomaly, source)
                    source.close()
                    self.checkpointer.roll_back(error)
                    source = reopen()
        except GeneratorExit:
            self._leave()
            raise
        except Exception:
            self._end.fail()
            self.checkpointer.finish_alone()
            raise
        finally:
            source.close()

    def _steps_of(self, source: StepSource, total: int | None, name: str) -> Generator[TakenStep]:
        step = self._run.step
        results = self._run.results
        checkpointer = self.checkpointer
        beat = own_heartbeat()
        clock = step.clock
        remaining = iter(source)
        is_last = True
        is_first = True
        with explain_worker_deaths(source), waits_counted(clock):
            while not (step.stopping or results.stopped):
                clock.enter("data")
                beat.beat(step.progress.step + 1, "first" if is_first else "step")
                with beat.call(name):
                    batches = next(remaining, None)
                    if batches is not None:
                        record = self._take(batches, source, is_first=is_first)
                if batches is None:
                    beat.beat(step.progress.step, "done")
                    break
                self._record(record, source)
                is_last = step.progress.step == total or step.stopping
                if step.stopping:  # a process that is asked to end has little time
                    checkpointer.after_step(last=True, last_of_epoch=batches.last_of_epoch)
                yield TakenStep(record, is_last, batches.last_of_epoch)
                is_last = is_last or step.stopping or results.stopped
                if checkpointer.saves:
                    checkpointer.after_step(last=is_last, last_of_epoch=batches.last_of_epoch)
                is_first = is_first and record is None
        step.flush()
        if not is_last:  # the data ended, at an unknown length
            checkpointer.after_step(last=True, last_of_epoch=True)
        checkpointer.finish(must_succeed=True)

    def _take(
        self, batches: StepBatches, source: StepSource, *, is_first: bool
    ) -> StepRecord | None:
        """Take one step, the first one of a source or another.

        Return no record if its data are skipped.
        """
        run = self._run
        step = self._run.step
        if batches.step in step.avoid:
            step.skip_step(batches.samples)
            return None
        run.modes.before_step(batches.step + 1)
        if is_first:
            self._check_loss(batches)
        with self._around_step():
            record = step.run(
                batches.mine, batches.num_micro_batches, batches.samples, epoch=batches.epoch
            )
        run.note_position(source, ended_epoch=batches.last_of_epoch)
        if not is_first and run.loss_check.left and not step.stopping:
            self._check_loss(batches)
        return record

    def _check_loss(self, batches: StepBatches) -> None:
        """Check in a run's first steps that the loss adds up over micro-batches."""
        self._run.loss_check.check(batches.mine, batches.num_micro_batches, batches.step)

    def after_update(self, record: StepRecord) -> None:
        """Record and save an update of `training_step`, whose loop is the caller's."""
        step = self._run.step
        self._record(record, None)
        is_last = step.progress.step == step.total or step.stopping
        self.checkpointer.after_step(last=is_last, last_of_epoch=False)

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
        self._end.record()

    def say(self, *lines: str) -> None:
        """Print lines, on rank 0.

        It also prints where nothing records the steps, and the console has none of them.
        """
        if self.is_recorded:
            self.monitor.say(*lines)
        elif self._run.is_main_process:
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
        if self._was_left:
            self._was_left = False
            self.checkpointer.save(must_succeed=False)
            self.checkpointer.finish(must_succeed=False)

    def close(self) -> None:
        """Close the monitor; the last line of a caller's loop says where the run is.

        A second call does nothing.
        """
        self._closing()

    def add_evaluation(self, found: Mapping[str, Any]) -> None:
        """Record an evaluation of the caller's own loop.

        Early stopping, `keep_best` and schedulers act on it.
        """
        run = self._run
        of_run = self._run.results
        step = self._run.step.progress.step
        results = {
            f"eval_{name}": value for name, value in found.items() if isinstance(value, int | float)
        }
        of_run.require_followed(results)
        if self._evaluated == step and of_run.are_acted_on and run.is_main_process:
            _log.warning(
                "warning: two evaluations after step %d count: for one that early_stopping,"
                " keep_best and schedulers should not see, write evaluate(…, counts=False)",
                step,
            )
        self._evaluated = step
        self._end.was_evaluated()
        was_stopped = of_run.stopped
        of_run.record_evaluation(results, followed=True)
        self.checkpointer.remember_evaluation(step, results)
        self.monitor.on_eval({"step": step, **results})
        if of_run.stopped and not was_stopped:
            why = of_run.why_stopped()
            self.monitor.event("early_stop", step=step, reason=why)
            self.say(why)
        if of_run.best_is_new:
            self.checkpointer.save(must_succeed=False)

    def _leave(self) -> None:
        """Save the run if the caller's loop was left and this is its only rank.

        Others may not have left it.
        """
        if not self.in_callers_loop or sys.is_finalizing():
            self.checkpointer.finish_alone()
            return
        own_heartbeat().beat(self._run.step.progress.step, "pause")
        self._was_left = self.checkpointer.needs_save
        if self._was_left and self._run.layout.world_size == 1:
            try:
                self.settle()
            except RunError as error:
                _log.warning(
                    "warning: the loop was left, and its last step was not saved: %s", error
                )
        else:
            self.checkpointer.finish_alone()
        self.monitor.pause()

    def _record(self, record: StepRecord | None, source: StepSource | None) -> None:
        """Record a step; None: its data were skipped."""
        run = self._run
        monitor = self.monitor
        run.output.check_lock()
        if record is not None:
            monitor.on_step(record)
            if run.step.placed.later_log_lines:
                self.say(*run.step.placed.take_log_lines())
            run.results.record_step(record)
            if record.recomputed:
                monitor.event("recomputed", step=record.step, what=record.recomputed)
                self.say(f"warning: {record.recomputed}")
        if run.step.anomaly is not None:
            self._report(run.step.anomaly, source)

    def report_and_finish(self, error: BadNumbersError) -> None:
        """Record the bad numbers that end a loop of `training_step`, and await a running save."""
        self._end.fail()
        self._report(error.anomaly, None)
        self.checkpointer.finish_alone()

    def _report(self, anomaly: Anomaly, source: StepSource | None) -> None:
        """Report an anomaly and its samples.

        They are dataset indices by micro-batch, if the data have any.
        """
        window = _window_of(anomaly, source)
        self.monitor.event(
            "bad_numbers",
            step=anomaly.step,
            what=anomaly.what,
            loss=anomaly.loss,
            grad_norm=anomaly.grad_norm,
            action=self._run.config.training.bad_numbers.action,
            samples=window and window.micro_batches,
            epoch=window.epoch if window else self._run.step.progress.epoch,
        )
        text = without_targets(anomaly, source) if anomaly.no_targets else anomaly.what
        if self.is_recorded:
            self.monitor.say(f"warning: {text}")
        elif self._run.is_main_process:
            warnings.warn(text, stacklevel=6)


def without_targets(anomaly: Anomaly, source: StepSource | None) -> str:
    """Return a sentence on a step without a valid target.

    It names the samples of the step, if the data number them.
    """
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


@contextmanager
def explain_worker_deaths(source: StepSource) -> Iterator[None]:
    """Add the samples being read to the error that torch raises when a data worker dies."""
    try:
        yield
    except RuntimeError as error:
        explained = source.explain(error) if isinstance(source, StepLoader) else None
        if explained is None:
            raise
        raise explained from None
