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

from lockstep import cluster, recovery_clock
from lockstep.bad_numbers import AnomalyDetector
from lockstep.config import Config, apply_flags
from lockstep.config.checks import launch_contradictions
from lockstep.environment import WORLD
from lockstep.errors import UsageError, refuse
from lockstep.heartbeat.writer import own_heartbeat, tell_call, write_limits
from lockstep.mesh import layout_of
from lockstep.models.language import set_token_losses
from lockstep.monitor.callbacks import understood
from lockstep.optim import PlateauSchedule
from lockstep.parallel.facts import facts_of
from lockstep.parallel.loss_weights import refuse_hidden
from lockstep.parallel.place import place
from lockstep.paths import bucket_url
from lockstep.precision import Precision, loss_scale_for, resolve_mode
from lockstep.step import Step
from lockstep.trainer import arguments, data_setup, no_effect, optimizer_setup
from lockstep.trainer.flight_dump import dump_collectives_on_request
from lockstep.trainer.loss_check import LossCheck
from lockstep.trainer.modes import Modes
from lockstep.trainer.named_loss import loss_fn_of
from lockstep.trainer.optimizer_setup import AfterUpdate, MakeOptimizer, MakeScheduler
from lockstep.trainer.results import Results
from lockstep.trainer.run_output import RunOutput
from lockstep.trainer.run_state import RunState
from lockstep.trainer.settings import with_settings
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
    callbacks = [one for one in own.get("callbacks") or () if not isinstance(one, str | Mapping)]
    if callbacks:
        own["callbacks"] = [one for one in own["callbacks"] if isinstance(one, str | Mapping)]
    for callback in callbacks:
        understood(callback)
    arguments.check_settings(own, methods)
    return apply_flags(own), callbacks


def assemble(given: TrainerArguments, settings: Mapping[str, Any]) -> RunState:
    """Place the model, make what its steps need, and return the state of a run at its start.

    Settings that have no effect are reported.

    Raises:
        UsageError: settings contradict each other or the model.
    """
    config = with_settings(given.config or Config(), settings)
    url = None if given.output_dir is None else bucket_url(given.output_dir, "output_dir")
    if url is not None:
        config = config.kept_in(url)
    asked = no_effect.asked_keys(config, settings)

    # The model, before it is placed and after.
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
    layout = layout_of(config.distributed, here.facts)
    mode, why_mode = resolve_mode(config.precision.mode, here.device)
    loss_fn = given.loss_fn or loss_fn_of(config)
    set_token_losses(
        given.model,
        label_smoothing=config.training.label_smoothing,
        z_loss=config.training.z_loss,
        chunks=config.training.loss_chunks,
        has_loss_fn=loss_fn is not None,
    )
    facts = facts_of(given.model, loss_fn)
    split = None
    if given.optimizer is None or isinstance(given.optimizer, str):
        split = optimizer_setup.asked_split(config.training)
    before = optimizer_setup.Unplaced.of(facts, loss_fn, split)
    trained = {p for p in (*given.model.parameters(), *before.of_loss) if p.requires_grad}
    num_trained = sum(p.numel() for p in trained if not is_lazy(p))  # `place` refuses lazy ones
    placed = place(
        facts, layout, config.step, device=here.device, precision=Precision(mode, here.device.type)
    )
    refuse_hidden(placed, before.hidden)
    if isinstance(loss_fn, WholeBatch):
        placed = with_whole_batch_loss(placed, loss_fn)

    # What makes an update of gradients.
    training = config.training
    callers_optimizer = None if isinstance(given.optimizer, str) else given.optimizer
    own_optimizer = callers_optimizer is not None
    optimizer, rate_line = optimizer_setup.make_optimizer(
        callers_optimizer,
        before,
        placed,
        config,
        data_setup.global_batch_size(training, layout),
    )
    modes = Modes(placed, optimizer)
    user_schedule = optimizer_setup.user_schedule(
        given.scheduler, optimizer, training, given.scheduler_metric
    )
    schedule = optimizer_setup.schedule_before_data(
        user_schedule, training, own_optimizer=own_optimizer
    )
    freeze_until = given.freeze_until or {}
    step = Step(
        placed,
        optimizer,
        schedule,
        training.gradient_clip,
        loss_scale_for(config.precision, mode),
        anomaly_detector=AnomalyDetector(training.bad_numbers),
        after_update=optimizer_setup.after_update_calls(
            given.after_update, given.freeze_until, placed
        ),
        frozen_until=optimizer_setup.frozen_until(freeze_until, list(before.names.values())),
    )
    plateau = user_schedule if isinstance(user_schedule, PlateauSchedule) else None
    if plateau is None and given.scheduler_metric != "eval_loss":
        what = "scheduler_metric is for a ReduceLROnPlateau, and the trainer has none"
        raise UsageError(what, where="Trainer(scheduler_metric=…)", fix="leave it out")

    # What looks at the steps, and where they are written.
    loss_check = LossCheck(placed, compiled=training.compile, coarse=mode != "fp32")
    if isinstance(loss_fn, WholeBatch):
        loss_check.skip()
    output = RunOutput(given.output_dir, config.checkpoint, world_size=layout.world_size)
    results = Results(
        training.early_stopping,
        plateau,
        config.checkpoint.keep_best,
        config.checkpoint.keep_best_mode,
    )
    _answer_the_launcher(config, here)
    without_effect = no_effect.of_trainer(
        config,
        layout,
        own_optimizer=own_optimizer,
        own_schedule=user_schedule is not None,
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
        step=step,
        modes=modes,
        loss_check=loss_check,
        results=results,
        mode=mode,
        why_mode=why_mode,
        num_trained=num_trained,
        user_schedule=user_schedule,
        own_optimizer=own_optimizer,
        rate_line=rate_line,
    )


def _answer_the_launcher(config: Config, here: cluster.Cluster) -> None:
    """Tell the launcher when this rank hangs, and let it ask for the last collectives then."""
    hang = config.distributed.hang
    write_limits(hang.factor, hang.seconds, config.distributed.timeout_seconds)
    dump_collectives_on_request(own_heartbeat().folder, here.facts.rank)
