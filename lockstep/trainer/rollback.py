"""What a run does about a step whose numbers are bad: it is reported, and the run may go back and pass it over."""

from typing import TYPE_CHECKING

from lockstep import checkpoint
from lockstep.bad_numbers import Anomaly, BadNumbersError
from lockstep.data import StepSource
from lockstep.monitor import Monitor
from lockstep.trainer import state
from lockstep.trainer.saving import Saving

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer


class Rollback:
    """How often a run went back, and to where; every rank has one, and calls each method at the same steps.

    Args:
        trainer: that goes back.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self._times: dict[int, int] = {}  # step → rollbacks to it

    def report(self, monitor: Monitor, source: StepSource, anomaly: Anomaly) -> None:
        """Which samples they were: dataset indices, by micro-batch; of data without indices, the step alone."""
        order = getattr(source, "order", None)
        window = order.window(anomaly.step - 1) if order is not None else None
        monitor.event(
            "bad_numbers", step=anomaly.step, what=anomaly.what, loss=anomaly.loss, grad_norm=anomaly.grad_norm,
            action=self._trainer.config.training.bad_numbers.action, samples=window and window.micro_batches,
            epoch=window.epoch if window else self._trainer.step.progress.epoch,
        )  # fmt: skip
        monitor.say(f"warning: {anomaly.what}")

    def go_back(self, error: BadNumbersError, monitor: Monitor, saving: Saving) -> None:
        """To the newest checkpoint, from where the bad step's data will be passed over.

        Raises:
            BadNumbersError: the config says to stop, there is nothing to go back to, or it has been done too often.
        """
        trainer = self._trainer
        saving.finish(must_succeed=False)
        if not error.goes_back or trainer.checkpoints is None:
            raise error
        stops, avoid = trainer.step.stopping, {*trainer.step.avoid, error.anomaly.step - 1}
        trainer.optimizer.zero_grad(set_to_none=True)
        if not checkpoint.list_checkpoints(trainer.checkpoints):
            monitor.say("there is no checkpoint yet to go back to")
            raise error
        found, step = state.go_back(trainer, "auto")
        assert found is not None, "there is one"
        # Each step is gone back to so often at most: else a run could go round for ever.
        self._times = {step: self._times.get(step, 0) + 1}
        if self._times[step] > trainer.config.training.bad_numbers.patience:
            raise error
        trainer.step.avoid, trainer.step.stopping = avoid, stops
        saving.went_back()
        monitor.event("rollback", step=step, checkpoint=found.name, passed_over=error.anomaly.step)
        monitor.say(f"goes back to step {step}, {found.name}, and passes over the data of step {error.anomaly.step}")
