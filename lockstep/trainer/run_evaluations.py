"""Acts on the evaluations of a run: early stopping, the learning rate, the best checkpoint.

Tests: tests/trainer/test_metrics.py, tests/trainer/test_ends.py
"""

from collections.abc import Mapping
from typing import Any

from lockstep.heartbeat.writer import own_heartbeat
from lockstep.monitor import Monitor
from lockstep.trainer.evaluator import Evaluator
from lockstep.trainer.run_state import RunState


def act_on(run: RunState, monitor: Monitor, results: Mapping[str, Any], *, followed: bool) -> bool:
    """Record the results of an evaluation; return whether they stop the run early.

    Early stopping and schedulers act on them if the evaluation is `followed`.
    """
    was_stopped = run.results.stopped
    run.results.record_evaluation(results, followed=followed)

    step = run.step.progress.step
    monitor.on_eval({"step": step, **results})
    stops = run.results.stopped and not was_stopped
    if stops:
        monitor.event("early_stop", step=step, reason=run.results.why_stopped())
    return stops


class RunEvaluations:
    """The evaluations of `Trainer.train`; every rank has them, and calls each at the same step."""

    def __init__(self, run: RunState, monitor: Monitor, evaluator: Evaluator) -> None:
        self._run = run
        self._monitor = monitor
        self._evaluator = evaluator
        self.is_due = evaluator.is_due  # after the current step

    def catch_up(self) -> None:
        """Evaluate the step that a resumed run was saved at, if a stop has prevented that."""
        if self._evaluator.was_stopped():
            is_due = self.is_due(last_of_epoch=self._run.ended_epoch)
            self.evaluate(followed=is_due)

    def at_end(self) -> None:
        """Evaluate the last step, unless that is done; nothing follows the results any more."""
        if self._evaluator.is_due_at_end and not self._run.step.stopping:
            self.evaluate(followed=False)

    def evaluate(self, *, followed: bool) -> None:
        """Evaluate; the run ends here if a rank was asked to stop meanwhile."""
        step = self._run.step
        with step.clock.during("evaluation"), own_heartbeat().call("evaluate"):
            results = self._evaluator.run()
        if results is not None:
            act_on(self._run, self._monitor, results, followed=followed)
            return
        step.stop()
        self._monitor.event("evaluation_stopped", step=step.progress.step)
