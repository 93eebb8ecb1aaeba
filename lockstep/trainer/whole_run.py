"""Runs a training from its current step to its end: steps, logs, evaluations, checkpoints, rollbacks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.bad_numbers import Anomaly, BadNumbersError
from lockstep.data import StepSource
from lockstep.monitor import Monitor
from lockstep.records import StepRecord
from lockstep.trainer import start
from lockstep.trainer.checkpointer import Checkpointer
from lockstep.trainer.evaluator import Evaluator

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

TakenSteps = Iterator[tuple[StepRecord | None, bool]]
"""(record, last of its epoch) of each step; no record if its data are skipped."""


@dataclass
class WholeRun:
    """One call of `Trainer.train`; every rank has one."""

    trainer: "Trainer"
    monitor: Monitor
    evaluator: Evaluator
    open_source: Callable[[], StepSource]  # returns the remaining steps of the data
    take: Callable[[StepSource], TakenSteps]  # runs the steps of a source

    def to_end(self, source: StepSource, total: int | None) -> StepRecord | None:
        """Train to the end, with rollbacks; close the source, and return the last step's record."""
        trainer, monitor = self.trainer, self.monitor
        try:
            checkpointer = Checkpointer(trainer, monitor)
            while True:
                try:
                    record = self._train(source, total, checkpointer)
                    break
                except BadNumbersError as error:
                    self._report(error.anomaly, source)
                    source.close()
                    checkpointer.roll_back(error)
                    source = self.open_source()
                except Exception:
                    checkpointer.finish_alone()
                    raise
            reason = "preempted" if trainer.step.stopping else "done"
            monitor.event("stop", step=trainer.step.progress.step, reason=reason)
            monitor.close()  # the last step's line comes first
            if record is not None:
                monitor.say(self._ending(checkpointer.saved))
        finally:
            source.close()
        return record

    def _train(self, source: StepSource, total: int | None, checkpointer: Checkpointer) -> StepRecord | None:
        """Train from the run's current step to its end, or to a step with bad numbers."""
        trainer, evaluator = self.trainer, self.evaluator
        step, state, following = trainer.step, trainer.state, trainer.state.following
        record, last = None, True
        if evaluator.was_stopped():
            self._evaluate(followed=evaluator.is_due(last_of_epoch=state.ended_epoch))
        begun = step.progress.step
        with start.explain_worker_deaths(source):
            for record, last_of_epoch in () if step.stopping or following.stopped else self.take(source):
                if trainer.lock is not None:
                    trainer.lock.check()
                if record is not None:
                    self._record(record)
                if step.anomaly is not None:
                    self._report(step.anomaly, source)
                last = step.progress.step == total or step.stopping
                # What follows the results is part of the last save; a plain evaluation waits until that is done.
                waits = last and not state.acts_on_evaluations
                if not step.stopping and not waits and evaluator.is_due(last_of_epoch=last_of_epoch):
                    self._evaluate(followed=True)
                    last = last or step.stopping or following.stopped
                checkpointer.after_step(last=last, last_of_epoch=last_of_epoch)
                if step.stopping or following.stopped:
                    break
        step.flush()
        if not last:  # the data ended, at an unknown length
            checkpointer.after_step(last=True, last_of_epoch=True)
        checkpointer.finish(must_succeed=True)
        if step.progress.step > begun and not step.stopping and evaluator.is_due_at_end:
            self._evaluate(followed=False)  # after the save: a run that is killed now loses this number alone
        return record

    def _ending(self, saved: int | None) -> str:
        """Return the line that a run ends with: where it is, and what to type next; `saved`: step of the last save."""
        trainer, run = self.trainer, self.trainer.run_directory
        step = trainer.step.progress.step
        following = trainer.state.following
        if trainer.step.stopping and not following.stopped:
            whether = "which is saved: the same command goes on" if saved == step else "which is not saved"
            return f"stopped after step {step}, {whether}"
        why = f"{following.why_stopped()}; " if following.stopped else ""
        where = f" in {run.path}; `lockstep report {run.path}` draws it" if run is not None else ""
        return f"{why}done after step {step}{where}"

    def _record(self, record: StepRecord) -> None:
        trainer, monitor = self.trainer, self.monitor
        monitor.counts_tokens = trainer.reads_tokens
        monitor.on_step(record)
        monitor.say(*trainer.placed.take_log_lines())
        trainer.state.record_step(record)
        if record.recomputed:
            monitor.event("recomputed", step=record.step, what=record.recomputed)
            monitor.say(f"warning: {record.recomputed}")

    def _report(self, anomaly: Anomaly, source: StepSource) -> None:
        """Report an anomaly and its samples: dataset indices by micro-batch, if the data have any."""
        order = getattr(source, "order", None)
        window = order.window(anomaly.step - 1) if order is not None else None
        self.monitor.event(
            "bad_numbers", step=anomaly.step, what=anomaly.what, loss=anomaly.loss, grad_norm=anomaly.grad_norm,
            action=self.trainer.config.training.bad_numbers.action, samples=window and window.micro_batches,
            epoch=window.epoch if window else self.trainer.step.progress.epoch,
        )  # fmt: skip
        self.monitor.say(f"warning: {anomaly.what}")

    def _evaluate(self, *, followed: bool) -> None:
        """Evaluate, and record the results; the run ends here if a rank was asked to stop meanwhile."""
        trainer, monitor, following = self.trainer, self.monitor, self.trainer.state.following
        step = trainer.step.progress.step
        with trainer.step.clock.during("evaluation"), trainer.heartbeat.call("evaluate"):
            results = self.evaluator.run()
        if results is None:
            trainer.step.stop()
            monitor.event("evaluation_stopped", step=step)
            return
        trainer.state.record_evaluation(results, followed=followed)
        monitor.on_eval({"step": step, **results})
        if followed and following.stopped:
            monitor.event("early_stop", step=step, reason=following.why_stopped())
