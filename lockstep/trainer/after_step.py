"""Lists what happens after each step, in order (`StepConsumers`).

    step → record → at once → the caller's code → afterwards → next step

A step returns a `StepRecord` and knows none of its readers. All three ways to train hand each step
to this list: `Trainer.train`, whose place for the caller's code is empty; `Trainer.steps`, which
yields the record there; and `Trainer.training_step`, after each update.

Tests: tests/trainer/test_after_step.py, tests/trainer/test_loops.py, tests/trainer/test_ends.py
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.bad_numbers import ALL_IGNORED, Anomaly
from lockstep.data import StepSource
from lockstep.errors import RunError, listed
from lockstep.monitor import Monitor
from lockstep.run_directory import recovery_clock
from lockstep.run_directory.records import StepRecord
from lockstep.trainer.checkpointer import Checkpointer
from lockstep.trainer.recovered import Recovered
from lockstep.trainer.run_evaluations import RunEvaluations
from lockstep.trainer.run_monitor import Announcer
from lockstep.trainer.run_state import RunState


@dataclass
class TakenStep:
    """A step that was taken, and where its data came from."""

    record: StepRecord | None  # None: its data were skipped
    source: StepSource | None  # None: the caller passed them, to `Trainer.training_step`
    last_of_epoch: bool = False


Consumer = Callable[[TakenStep], None]


@dataclass(frozen=True)
class StepConsumers:
    """Gives each step of a run to its consumers, a method for each; every rank has the same.

    Some of it gathers over ranks, so all of them go through it at the same steps.
    """

    run: RunState
    monitor: Monitor
    checkpointer: Checkpointer
    announcer: Announcer
    evaluations: RunEvaluations | None  # of `Trainer.train`; None: they are the caller's

    @property
    def at_once(self) -> list[Consumer]:
        """Return the consumers before the caller's code for the step, in order."""
        copies = self.checkpointer.copies is not None
        every = [
            self.keep_position,
            self.require_lock,
            self.keep_metrics,
            *([self.copy] if copies else []),
            self.record,
            *([self.commit_copy] if copies else []),
            *([self.tell_recovered] if recovery_clock.is_running() else []),
            self.say_placement_lines,
            self.tell_anomaly,
        ]
        if self.run.config.training.bad_numbers.recompute:
            every.append(self.tell_recomputed)
        if self.checkpointer.saves:
            every.append(self.save_before_stop)
        return every

    @property
    def afterwards(self) -> list[Consumer]:
        """Return the consumers after the caller's code for the step, in order."""
        every: list[Consumer] = []
        if self.evaluations is not None:
            every.append(self.evaluate_if_due)
        # After the evaluation: the learning rate, an early stop and the best checkpoint follow
        # from it.
        if self.checkpointer.saves:
            every.append(self.save_if_due)
        return every

    def keep_position(self, taken: TakenStep) -> None:
        """Keep how far the data are read, for the next checkpoint."""
        if taken.source is not None and taken.record is not None:
            self.run.note_position(taken.source, ended_epoch=taken.last_of_epoch)

    def require_lock(self, _taken: TakenStep) -> None:
        """End the run if another one has taken the run directory."""
        self.run.output.check_lock()

    def copy(self, taken: TakenStep) -> None:
        """Copy the run into memory if that is due, so that no step is lost that people read of.

        Where an evaluation or the caller's code comes first, `save_if_due` copies it after them.
        """
        evaluations = self.evaluations
        copies = self.checkpointer.copies
        if evaluations is None or copies is None or self.run.is_at_last_step:
            return
        if not evaluations.is_due(last_of_epoch=taken.last_of_epoch):
            copies.write()

    def commit_copy(self, _taken: TakenStep) -> None:
        """Make the copy visible, now that the step is recorded."""
        copies = self.checkpointer.copies
        if copies is not None:
            copies.commit()

    def record(self, taken: TakenStep) -> None:
        """Hand the record to meters, sinks, callbacks and the profiler (`Monitor.on_step`)."""
        if taken.record is not None:
            self.monitor.on_step(taken.record)

    def tell_recovered(self, taken: TakenStep) -> None:
        """Record how the run has gone on after deaths, after the first step that follows them."""
        recovery_clock.end_of("first_step")
        parts = recovery_clock.take()
        directory = self.run.output.directory
        if not parts or directory is None or not self.run.is_main_process:
            return
        recovered = Recovered.read(directory, self.run.step.progress.step, parts)
        self.monitor.event("recovered", **recovered.as_event())
        self.announcer.say(f"the run goes on: {recovered.sentence}")

    def say_placement_lines(self, _taken: TakenStep) -> None:
        """Print what the placed model has found out in its first steps."""
        placed = self.run.step.placed
        if placed.later_log_lines:
            self.announcer.say(*placed.take_log_lines())

    def keep_metrics(self, taken: TakenStep) -> None:
        """Keep loss and norm, by which the best checkpoint may be chosen."""
        if taken.record is not None:
            self.run.results.record_step(taken.record)

    def tell_recomputed(self, taken: TakenStep) -> None:
        """Tell of a step that was computed again, since a rank had computed it wrongly."""
        record = taken.record
        if record is not None and record.recomputed:
            self.monitor.event("recomputed", step=record.step, what=record.recomputed)
            self.announcer.say(f"warning: {record.recomputed}")

    def tell_anomaly(self, taken: TakenStep) -> None:
        """Tell of bad numbers, and of the samples that made them."""
        anomaly = self.run.step.anomaly
        if anomaly is not None:
            report_anomaly(self.run, self.monitor, self.announcer, anomaly, taken.source)

    def save_before_stop(self, taken: TakenStep) -> None:
        """Save at once where a rank was asked to stop: the process may have little time left."""
        if self.run.step.stopping:
            self.checkpointer.after_step(last=True, last_of_epoch=taken.last_of_epoch)

    def evaluate_if_due(self, taken: TakenStep) -> None:
        """Evaluate the model if that is due, and act on the results."""
        run = self.run
        evaluations = self.evaluations
        assert evaluations is not None
        if run.step.stopping or not evaluations.is_due(last_of_epoch=taken.last_of_epoch):
            return
        # Where nothing follows the results, the last step is saved before it is evaluated, by
        # `RunEvaluations.at_end`: a run that is killed in the evaluation loses one number.
        waits = run.is_at_last_step and not run.results.are_acted_on
        if not waits:
            evaluations.evaluate(followed=True)

    def save_if_due(self, taken: TakenStep) -> None:
        """Save the run if that is due; look after a background save."""
        run = self.run
        # An early stop ends loops over data. One of `training_step` may go on for as long as the
        # caller likes, and is not saved at each step after it.
        has_stopped = run.results.stopped and taken.source is not None
        is_last = run.is_at_last_step or has_stopped
        self.checkpointer.after_step(last=is_last, last_of_epoch=taken.last_of_epoch)


def report_anomaly(
    run: RunState,
    monitor: Monitor,
    announcer: Announcer,
    anomaly: Anomaly,
    source: StepSource | None,
) -> None:
    """Tell of an anomaly; its samples are dataset indices by micro-batch, if there are any.

    Of steps without a valid target the first is printed; all are recorded.
    """
    window = _window_of(anomaly, source)
    monitor.event(
        "bad_numbers",
        step=anomaly.step,
        what=anomaly.what,
        loss=anomaly.loss,
        grad_norm=anomaly.grad_norm,
        action=run.config.training.bad_numbers.action,
        samples=window and window.micro_batches,
        epoch=window.epoch if window else run.step.progress.epoch,
    )
    if not anomaly.no_targets:
        announcer.warn(anomaly.what)
    elif run.step.anomaly_detector.without_targets == 1:
        announcer.warn(without_targets(anomaly, source))


def tell_steps_without_targets(run: RunState, announcer: Announcer) -> None:
    """Tell how many steps had no valid target, at the end of the data or of the run.

    Raises:
        RunError: no step had one.
    """
    count = run.step.anomaly_detector.without_targets
    if count and run.step.progress.updates == 0 and not run.step.stopping:
        which = "the only step" if count == 1 else f"all {count} steps"
        raise RunError(
            f"nothing was trained: {which} had no valid target",
            where="the training data",
            why=ALL_IGNORED,
            fix="look at the targets of the data, and drop samples without any",
        )
    if count > 1:
        announcer.warn(f"{count} steps had no valid target, and made no update")


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
    return order.samples_of(anomaly.step - 1) if order is not None else None
