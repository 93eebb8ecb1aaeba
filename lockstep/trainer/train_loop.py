"""Runs `Trainer.train`: its evaluations, and the line that it ends with.

Tests: tests/trainer/test_trainer.py, tests/trainer/test_ends.py
"""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from shlex import quote

from lockstep.heartbeat.writer import own_heartbeat
from lockstep.records import StepRecord
from lockstep.trainer.evaluator import Evaluator
from lockstep.trainer.run_state import RunState
from lockstep.trainer.training_run import TakenStep, TrainingRun


@dataclass
class TrainLoop:
    """One call of `Trainer.train`; every rank has one."""

    run: RunState
    recorded: TrainingRun
    evaluator: Evaluator

    def to_end(self, steps: Generator[TakenStep]) -> StepRecord | None:
        """Train to the end of the steps, and return the last one's record."""
        run = self.run
        step = self.run.step
        evaluator = self.evaluator
        record = None
        if evaluator.was_stopped():
            self._evaluate(followed=evaluator.is_due(last_of_epoch=run.ended_epoch))
        begun = step.progress.step
        with closing(steps):
            for taken in steps:
                record = taken.record or record
                # What follows the results is part of the last save; a plain evaluation waits until
                # that is done.
                waits = taken.is_last and not run.results.are_acted_on
                if (
                    not step.stopping
                    and not waits
                    and evaluator.is_due(last_of_epoch=taken.last_of_epoch)
                ):
                    self._evaluate(followed=True)
        if step.progress.step > begun and not step.stopping and evaluator.is_due_at_end:
            # after the save: a run that is killed now loses this number alone
            self._evaluate(followed=False)
        self.recorded.record_end()
        self.recorded.monitor.close()  # the last step's line comes first
        if record is not None:
            self.recorded.monitor.say(self._last_line())
        return record

    def _last_line(self) -> str:
        """Return the line that a run ends with: where it is, and what to type next."""
        run = self.run
        directory = self.run.output.directory
        step = run.step.progress.step
        if run.step.stopping and not run.results.stopped:
            is_saved = self.recorded.checkpointer.saved == step
            return f"stopped after step {step}, which is " + (
                "saved: the same command goes on" if is_saved else "not saved"
            )
        why = f"{run.results.why_stopped()}; " if run.results.stopped else ""
        where = ""
        if directory is not None:
            where = f" in {directory.path}; `lockstep report {quote(str(directory.path))}` draws it"
        return f"{why}done after step {step}{where}"

    def _evaluate(self, *, followed: bool) -> None:
        """Evaluate, and record the results.

        The run ends here if a rank was asked to stop meanwhile.
        """
        run = self.run
        monitor = self.recorded.monitor
        step = run.step.progress.step
        with run.step.clock.during("evaluation"), own_heartbeat().call("evaluate"):
            results = self.evaluator.run()
        if results is None:
            run.step.stop()
            monitor.event("evaluation_stopped", step=step)
            return
        run.results.record_evaluation(results, followed=followed)
        monitor.on_eval({"step": step, **results})
        if followed and run.results.stopped:
            monitor.event("early_stop", step=step, reason=run.results.why_stopped())
