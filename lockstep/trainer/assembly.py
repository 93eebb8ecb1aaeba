"""Puts a run together from a trainer's arguments: checks, placed model, optimizer, step.

    arguments, settings → config → cluster, layout → placed model → optimizer → step → RunState

Tests: tests/trainer/test_arguments.py, tests/trainer/test_settings.py,
tests/trainer/test_no_effect.py
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.bad_numbers import AnomalyDetector
from lockstep.config import Config, apply_flags
from lockstep.config.checks_launch import launch_contradictions
from lockstep.config.loading import with_settings
from lockstep.errors import UsageError, refuse
from lockstep.files.paths import bucket_url
from lockstep.heartbeat.writer import own_heartbeat, tell_call, write_limits
from lockstep.machine.environment import WORLD
from lockstep.models.language import set_token_losses
from lockstep.monitor.callbacks import understood
from lockstep.optim import PlateauSchedule, TorchSchedule
from lockstep.parallel.facts import facts_of
from lockstep.parallel.loss_weights import refuse_hidden
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.place import place
from lockstep.precision import Mode, Precision, loss_scale_for, resolve_mode
from lockstep.process_group import cluster
from lockstep.run_directory import recovery_clock
from lockstep.step import Step
from lockstep.strategy import layout_of_ranks
from lockstep.trainer import arguments, data_setup, no_effect, optimizer_setup
from lockstep.trainer.flight_dump import dump_collectives_on_request
from lockstep.trainer.loss_check import LossCheck
from lockstep.trainer.modes import Modes
from lockstep.trainer.named_loss import loss_fn_of
from lockstep.trainer.optimizer_setup import AfterUpdate, MakeOptimizer, MakeScheduler, Unplaced
from lockstep.trainer.results import Results
from lockstep.trainer.run_output import RunOutput
from lockstep.trainer.run_state import RunState
from lockstep.trainer.whole_batch import WholeBatch, with_whole_batch_loss


@dataclass(frozen=True)
class TrainerArguments:
    """The arguments of `Trainer` besides the settings, as the caller gives them."""

    model: nn.Module
    optimizer: Optimizer | MakeOptimizer | str | None
    loss_fn: Callable[..., Tensor] | None
    scheduler: LRScheduler | MakeScheduler | None
    scheduler_metric: str
    config: Config | None
    output_dir: str | Path | None
    after_update: AfterUpdate | list[AfterUpdate] | None
    freeze_until: Mapping[str, int] | None

    def check(self) -> None:
        """Raise a UsageError if one of them is something else than its name says."""
        arguments.check_of_trainer(
            self.optimizer, self.loss_fn, self.scheduler, self.config, self.after_update
        )
        named_loss = self.config and self.config.loss_fn
        has_loss_fn = (self.loss_fn or named_loss) is not None
        arguments.check_model(self.model, "Trainer", has_loss_fn=has_loss_fn)
        arguments.check_loss_fn(self.loss_fn, "Trainer")


def settings_and_callbacks(
    given: TrainerArguments,
    settings: Mapping[str, Any],
    methods: Sequence[Callable[..., Any]],
) -> tuple[dict[str, Any], list[Any]]:
    """Return the settings by dotted key, and the callbacks that are objects.

    Args:
        given: whose optimizer may be a name, which is a setting.
        settings: the keyword arguments of `Trainer`.
        methods: whose parameters a wrong name may be meant for.
    """
    own = dict(settings)
    if isinstance(given.optimizer, str):
        own["optimizer"] = given.optimizer
    callbacks = [each for each in own.get("callbacks") or () if not isinstance(each, str | Mapping)]
    if callbacks:
        own["callbacks"] = [each for each in own["callbacks"] if isinstance(each, str | Mapping)]
    for callback in callbacks:
        understood(callback)
    arguments.check_settings(own, methods)
    return apply_flags(own), callbacks


@dataclass(frozen=True)
class _TrainedModel:
    """A placed model, with what was read of it before it was placed."""

    placed: ParallelModel
    unplaced: Unplaced  # its parameters, as the caller's optimizer knows them
    num_trained: int  # numbers of the whole model, and of a loss with weights, that are trained
    mode: Mode  # of the precision
    why_mode: str  # why it was chosen; "" where the settings say it
    takes_whole_batch: bool  # its loss is one of the whole batch


@dataclass(frozen=True)
class _Updates:
    """The parts that make updates of gradients: the step, and what it was made with."""

    step: Step
    modes: Modes
    user_schedule: TorchSchedule | PlateauSchedule | None
    own_optimizer: bool  # the optimizer is the caller's
    rate_line: str  # what the log says of the learning rate

    @property
    def plateau(self) -> PlateauSchedule | None:
        """The caller's schedule, where it follows a metric."""
        schedule = self.user_schedule
        return schedule if isinstance(schedule, PlateauSchedule) else None


def assemble(given: TrainerArguments, settings: Mapping[str, Any]) -> RunState:
    """Place the model, make what its steps need, and return the state of a run at its start.

    Settings that have no effect are reported.

    Raises:
        UsageError: settings contradict each other or the model.
    """
    config = _complete_config(given, settings)
    asked = no_effect.asked_keys(config, settings)
    here = _join_ranks(config)
    model = _place_model(given, config, here)
    updates = _prepare_updates(given, config, model)

    # What looks at the steps, and where they are written.
    layout = model.placed.layout
    checkpoints = config.checkpoint
    loss_check = LossCheck(
        model.placed, compiled=config.training.compile, coarse=model.mode != "fp32"
    )
    if model.takes_whole_batch:
        loss_check.skip()
    output = RunOutput(given.output_dir, checkpoints, world_size=layout.world_size)
    results = Results(
        config.training.early_stopping,
        updates.plateau,
        checkpoints.keep_best,
        checkpoints.keep_best_mode,
    )
    _answer_the_launcher(config, here)
    without_effect = no_effect.of_trainer(
        config,
        layout,
        own_optimizer=updates.own_optimizer,
        own_schedule=updates.user_schedule is not None,
        has_directory=given.output_dir is not None,
        has_memory=output.memory is not None,
    )
    no_effect.report(without_effect, asked, is_main=here.facts.is_main)
    recovery_clock.end_of("placed")
    return RunState(
        config=config,
        asked=asked,
        cluster=here,
        output=output,
        step=updates.step,
        modes=updates.modes,
        loss_check=loss_check,
        results=results,
        mode=model.mode,
        why_mode=model.why_mode,
        num_trained=model.num_trained,
        user_schedule=updates.user_schedule,
        own_optimizer=updates.own_optimizer,
        rate_line=updates.rate_line,
    )


def _complete_config(given: TrainerArguments, settings: Mapping[str, Any]) -> Config:
    """Return the caller's config with the settings, kept in a bucket if `output_dir` is one."""
    config = with_settings(given.config, settings)
    url = None if given.output_dir is None else bucket_url(given.output_dir, "output_dir")
    return config if url is None else config.kept_in(url)


def _join_ranks(config: Config) -> cluster.Cluster:
    """Join the other ranks, and refuse settings that the launcher's do not go with."""
    here = cluster.setup(config.distributed)
    tell_call("Trainer")
    recovery_clock.end_of("groups")
    refuse(
        launch_contradictions(
            config,
            max_restarts=int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")),
            builds_again=here.facts.world_size == 1 or bool(os.environ.get(WORLD)),
            device_type=here.device.type,
        )
    )
    return here


def _place_model(given: TrainerArguments, config: Config, here: cluster.Cluster) -> _TrainedModel:
    """Read what the model and its loss offer, and place them on the ranks."""
    training = config.training
    layout = layout_of_ranks(config.distributed, here.facts)
    mode, why_mode = resolve_mode(config.precision.mode, here.device)
    loss_fn = given.loss_fn or loss_fn_of(config)
    set_token_losses(
        given.model,
        label_smoothing=training.label_smoothing,
        z_loss=training.z_loss,
        chunks=training.loss_chunks,
        has_loss_fn=loss_fn is not None,
    )
    facts = facts_of(given.model, loss_fn)
    split = None
    if given.optimizer is None or isinstance(given.optimizer, str):
        split = optimizer_setup.asked_split(training)
    unplaced = Unplaced.of(facts, loss_fn, split)
    trained = {p for p in (*given.model.parameters(), *unplaced.of_loss) if p.requires_grad}
    num_trained = sum(p.numel() for p in trained if not is_lazy(p))  # `place` refuses lazy ones

    precision = Precision(mode, here.device.type)
    placed = place(facts, layout, config.step, device=here.device, precision=precision)
    refuse_hidden(placed, unplaced.hidden)
    takes_whole_batch = False
    if isinstance(loss_fn, WholeBatch):
        takes_whole_batch = True
        placed = with_whole_batch_loss(placed, loss_fn)
    return _TrainedModel(placed, unplaced, num_trained, mode, why_mode, takes_whole_batch)


def _prepare_updates(given: TrainerArguments, config: Config, model: _TrainedModel) -> _Updates:
    """Make the optimizer, its schedule, and the step that calls them."""
    training = config.training
    placed = model.placed
    callers_optimizer = None if isinstance(given.optimizer, str) else given.optimizer
    own_optimizer = callers_optimizer is not None
    samples = data_setup.global_batch_size(training, placed.layout)
    optimizer, rate_line = optimizer_setup.make_optimizer(
        callers_optimizer, model.unplaced, placed, config, samples
    )
    modes = Modes(placed, optimizer)
    user_schedule = optimizer_setup.user_schedule(
        given.scheduler, optimizer, training, given.scheduler_metric
    )
    schedule = optimizer_setup.schedule_before_data(
        user_schedule, training, own_optimizer=own_optimizer
    )
    step = Step(
        placed,
        optimizer,
        schedule,
        training.gradient_clip,
        loss_scale_for(config.precision, model.mode),
        anomaly_detector=AnomalyDetector(training.bad_numbers),
        after_update=optimizer_setup.after_update_calls(
            given.after_update, given.freeze_until, placed
        ),
        frozen_until=optimizer_setup.frozen_until(
            given.freeze_until or {}, list(model.unplaced.names.values())
        ),
    )
    updates = _Updates(step, modes, user_schedule, own_optimizer, rate_line)
    if updates.plateau is None and given.scheduler_metric != "eval_loss":
        what = "scheduler_metric is for a ReduceLROnPlateau, and the trainer has none"
        raise UsageError(what, where="Trainer(scheduler_metric=…)", fix="leave it out")
    return updates


def _answer_the_launcher(config: Config, here: cluster.Cluster) -> None:
    """Tell the launcher when this rank hangs, and let it ask for the last collectives then."""
    hang = config.distributed.hang
    write_limits(hang.factor, hang.seconds, config.distributed.timeout_seconds)
    dump_collectives_on_request(own_heartbeat().folder, here.facts.rank)
