"""Runs the steps of a training in every way to train, and goes back after bad numbers.

`Trainer.train` and `Trainer.steps` are loops over `TrainingRun.steps`; `Trainer.training_step`
hands over each update. What consumes a step is listed in `after_step.py`.

Tests: tests/trainer/test_loops.py, tests/trainer/test_trainer.py, tests/parity/test_law_one.py
"""

import logging
import sys
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import nullcontext
from typing import Any

from lockstep.bad_numbers import Anomaly, BadNumbersError
from lockstep.data import StepBatches, StepLoader, StepSource
from lockstep.errors import RunError
from lockstep.heartbeat.writer import own_heartbeat
from lockstep.monitor import Monitor
from lockstep.monitor.meters import waits_counted
from lockstep.run_directory.records import StepRecord
from lockstep.trainer.after_step import (
    StepConsumers,
    TakenStep,
    report_anomaly,
    tell_steps_without_targets,
)
from lockstep.trainer.caller_batches import OpenStep
from lockstep.trainer.checkpointer import Checkpointer
from lockstep.trainer.evaluation import explain_bad_index
from lockstep.trainer.run_end import RunEnd, done_line
from lockstep.trainer.run_evaluations import RunEvaluations, act_on
from lockstep.trainer.run_monitor import Announcer, AroundStep
from lockstep.trainer.run_state import RunState

_log = logging.getLogger("lockstep")


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
        evaluations: RunEvaluations | None = None,  # of `Trainer.train`; None: the caller's
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
        self.announcer = Announcer(monitor, is_recorded, run.is_main_process)
        consumers = StepConsumers(run, monitor, self.checkpointer, self.announcer, evaluations)
        self._at_once = consumers.at_once
        self._afterwards = consumers.afterwards
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
        self, source: StepSource, reopen: Callable[[], StepSource], name: str
    ) -> Generator[StepRecord | None]:
        """Yield each step's record to the run's end, with rollbacks; close the source.

        A record is None where the data of a step are skipped, after a rollback.

        Args:
            source: the remaining steps.
            reopen: returns the remaining steps anew, after a rollback.
            name: of the function as whose call each step counts, which all ranks make together.
        """
        try:
            while True:
                try:
                    yield from self._steps_of(source, name)
                    return
                except BadNumbersError as error:
                    self._tell_anomaly(error.anomaly, source)
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

    def _steps_of(self, source: StepSource, name: str) -> Generator[StepRecord | None]:
        """Take the steps of a source, and hand each to what consumes it (`after_step.py`)."""
        run = self._run
        step = run.step
        beat = own_heartbeat()
        call = beat.call(name)
        remaining = iter(source)
        num_taken = 0
        is_first = True
        # only what records the steps reads the clock
        counted = waits_counted(step.clock) if self.is_recorded else nullcontext()
        with counted:
            while not (step.stopping or run.results.stopped):
                step.clock.enter("data")
                beat.beat(step.progress.step + 1, "first" if is_first else "step")
                batches = None
                try:
                    with call:
                        batches = next(remaining, None)
                        if batches is not None:
                            record = self._take(batches, is_first=is_first)
                    if batches is None:
                        beat.beat(step.progress.step, "done")
                        break
                    num_taken += 1
                    is_first = is_first and record is None
                    taken = TakenStep(record, source, batches.last_of_epoch)
                    for consume in self._at_once:
                        consume(taken)
                except (RuntimeError, IndexError) as error:
                    explain(error, batches, source)
                    raise

                yield record
                # Not explained: workers of the validation data may die in here.
                for consume in self._afterwards:
                    consume(taken)
        step.flush()
        if num_taken and not (run.is_at_last_step or run.results.stopped):
            # The data ended, at a length that was unknown: their last step was not known for it.
            self.checkpointer.after_step(last=True, last_of_epoch=True)
        self.checkpointer.finish(must_succeed=True)
        if num_taken:
            tell_steps_without_targets(run, self.announcer)

    def _take(self, batches: StepBatches, *, is_first: bool) -> StepRecord | None:
        """Take one step; return no record if its data are skipped.

        In a run's first steps the loss is checked, too: it has to add up over micro-batches.
        """
        run = self._run
        step = self._run.step
        if batches.step in step.avoid:
            step.skip_step(batches.samples)
            return None
        run.modes.before_step(batches.step + 1)
        if is_first:  # before the step, so that a refusal comes before anything is trained
            run.loss_check.check(batches.mine, batches.num_micro_batches, batches.step)
        with self._around_step():
            record = step.run(
                batches.mine, batches.num_micro_batches, batches.samples, epoch=batches.epoch
            )
        if not is_first and run.loss_check.left and not step.stopping:
            run.loss_check.check(batches.mine, batches.num_micro_batches, batches.step)
        return record

    def after_update(self, record: StepRecord) -> None:
        """Hand an update of `training_step`, whose loop is the caller's, to what consumes it."""
        taken = TakenStep(record, source=None)
        for consume in (*self._at_once, *self._afterwards):
            consume(taken)

    def end_loop(self, *, is_last: bool) -> None:
        """Write what the caller's loop has recorded.

        The run stays open, since another loop may follow.
        """
        if is_last:
            self.record_end()
        self.monitor.pause()
        if not self.is_recorded:
            self.close()

    def finish(self, *, took_steps: bool) -> None:
        """End a run of `Trainer.train`; its last line says where it is, if it `took_steps`."""
        self.record_end()
        self.monitor.close()  # the last step's line comes first
        if took_steps:
            self.monitor.say(self._last_line())

    def _last_line(self) -> str:
        """Return the line that the run ends with: where it is, and what to type next."""
        run = self._run
        step = run.step.progress.step
        if run.step.stopping and not run.results.stopped:
            is_saved = self.checkpointer.saved == step
            return f"stopped after step {step}, which is " + (
                "saved: the same command goes on" if is_saved else "not saved"
            )
        why = f"{run.results.why_stopped()}; " if run.results.stopped else ""
        directory = run.output.directory
        return why + done_line(step, None if directory is None else str(directory.path))

    def record_end(self) -> None:
        """Record how the run ended."""
        self._end.record()

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

    def add_evaluation(self, values: Mapping[str, Any]) -> None:
        """Record an evaluation of the caller's own loop.

        Early stopping, `keep_best` and schedulers act on it.
        """
        run = self._run
        results = {
            f"eval_{name}": value
            for name, value in values.items()
            if isinstance(value, int | float)
        }
        step = run.step.progress.step
        run.results.require_followed(results)
        if self._evaluated == step and run.results.are_acted_on and run.is_main_process:
            _log.warning(
                "warning: two evaluations after step %d count: for one that early_stopping,"
                " keep_best and schedulers should not see, write evaluate(…, counts=False)",
                step,
            )
        self._evaluated = step
        self._end.was_evaluated()
        self.checkpointer.remember_evaluation(step, results)
        if act_on(run, self.monitor, results, followed=True):
            self.announcer.say(run.results.why_stopped())
        if run.results.best_is_new:
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

    def report_and_finish(self, error: BadNumbersError) -> None:
        """Record the bad numbers that end a loop of `training_step`, and await a running save."""
        self._end.fail()
        self._tell_anomaly(error.anomaly, None)
        self.checkpointer.finish_alone()

    def _tell_anomaly(self, anomaly: Anomaly, source: StepSource | None) -> None:
        report_anomaly(self._run, self.monitor, self.announcer, anomaly, source)


def explain(
    error: RuntimeError | IndexError, batches: StepBatches | None, source: StepSource
) -> None:
    """Raise an error that names the samples behind `error`, if it is about some; else return.

    They were being read when a data worker died, of which torch tells wherever the loop is; or a
    layer has no place for one of their indices.
    """
    if isinstance(error, RuntimeError) and isinstance(source, StepLoader):
        explained = source.explain(error)
        if explained is not None:
            raise explained from None
    if batches is not None:
        explain_bad_index(error, batches.mine, batches.step, source)
