"""Runs `Trainer.train`: its evaluations, and the line that it ends with.

Tests: tests/trainer/test_trainer.py, tests/trainer/test_ends.py
"""

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from shlex import quote

from lockstep.records import StepRecord
from lockstep.trainer.evaluator import Evaluator
from lockstep.trainer.training_run import TakenStep, TrainingRun


@dataclass
class TrainLoop:
    """One call of `Trainer.train`; every rank has one."""

    run: TrainingRun
    evaluator: Evaluator

    def to_end(self, steps: Generator[TakenStep]) -> StepRecord | None:
        """Train to the end of the steps, and return the last one's record."""
        run, trainer, evaluator = self.run, self.run.trainer, self.evaluator
        step, state = trainer.step, trainer.state
        record = None
        if evaluator.was_stopped():
            self._evaluate(followed=evaluator.is_due(last_of_epoch=state.ended_epoch))
        begun = step.progress.step
        with closing(steps):
            for taken in steps:
                record = taken.record or record
                # What follows the results is part of the last save; a plain evaluation waits until
                # that is done.
                waits = taken.is_last and not state.acts_on_evaluations
                if (
                    not step.stopping
                    and not waits
                    and evaluator.is_due(last_of_epoch=taken.last_of_epoch)
                ):
                    self._evaluate(followed=True)
        if step.progress.step > begun and not step.stopping and evaluator.is_due_at_end:
            # after the save: a run that is killed now loses this number alone
            self._evaluate(followed=False)
        run.record_end()
        run.monitor.close()  # the last step's line comes first
        if record is not None:
            run.monitor.say(self._ending(run.checkpointer.saved))
        return record

    def _ending(self, saved: int | None) -> str:
        """Return the line that a run ends with: where it is, and what to type next.

        `saved`: step of the last save.
        """
        trainer, run = self.run.trainer, self.run.trainer.run_directory
        step = trainer.step.progress.step
        following = trainer.state.following
        if trainer.step.stopping and not following.stopped:
            whether = (
                "which is saved: the same command goes on"
                if saved == step
                else "which is not saved"
            )
            return f"stopped after step {step}, {whether}"
        why = f"{following.why_stopped()}; " if following.stopped else ""
        where = (
            f" in {run.path}; `lockstep report {quote(str(run.path))}` draws it"
            if run is not None
            else ""
        )
        return f"{why}done after step {step}{where}"

    def _evaluate(self, *, followed: bool) -> None:
        """Evaluate, and record the results.

        The run ends here if a rank was asked to stop meanwhile.
        """
        trainer, monitor, following = (
            self.run.trainer,
            self.run.monitor,
            self.run.trainer.state.following,
        )
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
