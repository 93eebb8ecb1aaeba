"""`RunState`: what a run is on this rank, at any moment.

What trains, evaluates and saves is given it.

Tests: tests/trainer/test_loops.py, tests/trainer/test_resume.py
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.config import Config
from lockstep.data import StepSource
from lockstep.layout import Layout
from lockstep.optim import PlateauSchedule, TorchSchedule, scaled_learning_rate
from lockstep.process_group.cluster import Cluster
from lockstep.step import Step
from lockstep.trainer.arguments import check_trains
from lockstep.trainer.average import WeightAverage
from lockstep.trainer.data_setup import global_batch_size, with_batch_size_of
from lockstep.trainer.loss_check import LossCheck
from lockstep.trainer.modes import Modes
from lockstep.trainer.optimizer_options import GivenOptions
from lockstep.trainer.optimizer_setup import schedule_over
from lockstep.trainer.results import Results
from lockstep.trainer.run_output import RunOutput


@dataclass
class RunState:
    """The state of a run.

    `step` holds the placed model, the optimizer, the schedule and the progress; random numbers
    follow from the progress.
    """

    config: Config  # with the batch size that the data bring
    asked: frozenset[str]  # dotted keys of the settings that someone set
    cluster: Cluster
    output: RunOutput
    step: Step
    modes: Modes
    loss_check: LossCheck
    results: Results
    mode: str  # of the precision: fp32, bf16 or fp16
    why_mode: str  # why it was chosen; "" where the settings say it
    num_trained: int  # numbers of the whole model, and of a loss with weights, that are trained
    user_schedule: TorchSchedule | PlateauSchedule | None
    own_optimizer: bool  # the optimizer is the caller's, and brings a learning rate of its own
    rate_line: str  # what the log says of the learning rate
    position: dict[str, Any] = field(default_factory=dict)  # in the data
    steps_per_epoch: int | None = None  # of the data, if it is known
    ended_epoch: bool = False  # the last step was the last of its epoch
    data_workers: int = 0  # of the training data

    def __post_init__(self) -> None:
        self.given_options = GivenOptions(self.step.optimizer)

    @property
    def layout(self) -> Layout:
        """The number of ranks along each axis."""
        return self.step.placed.layout

    @property
    def is_main_process(self) -> bool:
        """Return whether this is rank 0."""
        return self.cluster.facts.is_main

    @property
    def global_batch_size(self) -> int:
        """Samples in a full step, over all ranks."""
        return global_batch_size(self.config.training, self.layout)

    @property
    def was_stopped(self) -> bool:
        """Return whether the run was stopped.

        Its evaluations stopped it early, or a rank was asked to stop.
        """
        return self.step.stopping or self.results.stopped

    @property
    def is_at_last_step(self) -> bool:
        """Return whether the step that was just made is the last that is known or asked for."""
        return self.step.stopping or self.step.progress.step == self.step.total

    @property
    def done(self) -> bool:
        """Return whether the run has come to its end.

        The end is its last step, an early stop, or a request to stop.
        """
        return self.was_stopped or 0 < self.step.total <= self.step.progress.step

    @property
    def evaluated_average(self) -> WeightAverage | None:
        """The average, if any, whose weights are evaluated and saved in place of the model's."""
        averages = (call for call in self.step.after_update if getattr(call, "evaluates", False))
        return next(averages, None)  # type: ignore[return-value]

    def adopt_batch_size(self, data: Any) -> None:
        """Use a DataLoader's own batch size, if the settings have none.

        The learning rate follows its rule.
        """
        config = with_batch_size_of(data, self.config)
        if config is self.config:
            return
        self.config = config
        if not self.own_optimizer:
            rate, self.rate_line = scaled_learning_rate(config.training, self.global_batch_size)
            for group in self.step.optimizer.param_groups:
                group["lr"] = rate
                group["initial_lr"] = rate

    def change_settings(self, dotted: Mapping[str, Any]) -> None:
        """Replace values of the config, by dotted key."""
        self.config = self.config.replaced(dotted)

    def check_can_train(self) -> None:
        """Raise a UsageError if the ranks have become others, or if nothing is to be trained."""
        self.cluster.check()
        # Of the whole model: a pipeline's stage may have nothing to train, and a model without may
        # have got something since.
        if self.num_trained == 0:
            check_trains(self.step.placed.parameters)

    def plan_steps(self, total: int | None) -> None:
        """Set the number of the run's last step, if it is known, and the schedule over them."""
        training = self.config.training
        schedule = schedule_over(
            self.user_schedule, training, total, own_optimizer=self.own_optimizer
        )
        self.step.plan_run(total, schedule)

    def adopt_source(self, source: StepSource, workers: int) -> None:
        """Note the length of the data that a loop begins with, and how many `workers` read them."""
        self.steps_per_epoch = source.steps_per_epoch
        self.data_workers = workers

    def note_position(self, source: StepSource, *, ended_epoch: bool) -> None:
        """Keep how far the data were read by the step that was made."""
        self.position = source.state_dict()
        self.ended_epoch = ended_epoch

    def state_dict(self) -> dict[str, Any]:
        """Return all state besides tensors."""
        return {
            **self.step.state_dict(),
            **self.results.state_dict(),
            "source": self.position,
            "steps_per_epoch": self.steps_per_epoch,
            "ended_epoch": self.ended_epoch,
            "given_options": self.given_options.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step.load_state_dict(state)
        self.results.load_state_dict(state)
        self.position = state["source"]
        self.ended_epoch = state.get("ended_epoch", False)
        self.given_options.load_state(state.get("given_options"))
