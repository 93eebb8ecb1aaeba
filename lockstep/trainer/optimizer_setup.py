"""Makes the optimizer, its schedule and the calls after its updates.

Arguments and the config describe them.

Tests: tests/trainer/test_scheduler.py, tests/trainer/test_updates.py
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep import optim
from lockstep.config import Config, TrainingConfig
from lockstep.errors import UsageError, did_you_mean, listed, warn_at_caller
from lockstep.models.loss_modules import hidden_parameters
from lockstep.muon import SPLITS, Muon
from lockstep.optim import PlateauSchedule, Schedule, TorchSchedule
from lockstep.parallel.facts import ModelFacts
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.strides import lay_states
from lockstep.parallel.tensor.matrix_splits import Splits, splits_of
from lockstep.process_group.collectives import is_main_process
from lockstep.registry import OPTIMIZERS
from lockstep.trainer.arguments import check_made

MakeOptimizer = Callable[[Any], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True)
class Unplaced:
    """The parameters before they are placed."""

    names: dict[int, str]  # id → canonical name, of the model's and of its loss function's
    of_loss: list[nn.Parameter]  # those of the loss function
    hidden: list[nn.Parameter]  # those of a loss function that is not a module
    blocks: list[str]  # the names of the model's repeated blocks
    splits: Splits  # of weights that the optimizer of a config splits into matrices

    @classmethod
    def of(cls, facts: ModelFacts, loss_fn: Any, split: str | None = None) -> "Unplaced":
        """Return those of a model and its loss function; `split`: see `asked_split`."""
        names = dict(facts.names)
        own = {} if facts.loss is None else facts.loss.weights
        hidden = hidden_parameters(loss_fn, names)
        blocks = [name for name, _ in facts.blocks]
        named = names | {id(p): name for name, p in own.items()}
        splits = {} if split is None else splits_of(facts, split)
        return cls(named, list(own.values()), hidden, blocks, splits)


def asked_split(training: TrainingConfig) -> str | None:
    """Return how a config's Muon splits weights into matrices; None: it does not."""
    split = training.optimizer_args.get("split")
    kind = OPTIMIZERS.load(training.optimizer) if split in SPLITS else None
    return split if isinstance(kind, type) and issubclass(kind, Muon) else None


def make_optimizer(
    given: Optimizer | MakeOptimizer | None,
    before: Unplaced,
    placed: ParallelModel,
    config: Config,
    global_batch_size: int,
) -> tuple[Optimizer, str]:
    """Return an optimizer (None: the config's) and its rate's log line."""
    training = config.training
    rate, line = optim.scaled_learning_rate(training, global_batch_size)
    if given is None:
        optimizer = optim.build_optimizer(
            training.optimizer,
            placed.parameters,
            learning_rate=rate,
            weight_decay=training.weight_decay,
            args=training.optimizer_args,
            device=placed.random_state.device,
            reproducible=config.distributed.reproducible,
            blocks=before.blocks,
            splits=before.splits,
        )
    elif isinstance(given, Optimizer):
        optim.rebind(optimizer := given, before.names, placed.parameters)
        lay_states(optimizer)
    else:

        def make(parameters: Any) -> Optimizer:
            optimizer = given(parameters)
            check_made(optimizer, Optimizer, given, "Trainer(optimizer=…)")
            return optimizer

        optimizer = optim.made_by(make, placed.parameters, before.names, before.of_loss)
    _warn_of_untrained(optimizer, placed)
    optim.check_no_closure(optimizer)
    if given is not None:
        line = (
            f"learning rate {optimizer.param_groups[0]['lr']:g}, as {type(optimizer).__name__} says"
        )
    if optim.updates_parts(optimizer):
        optim.check_cut(type(optimizer))
    if placed.layout.shards_parameters:
        optim.check_shardable(optimizer)
    if share := getattr(optimizer, "share_among", None):
        share(placed.groups_alike())
    return optimizer, line


def _warn_of_untrained(optimizer: Optimizer, placed: ParallelModel) -> None:
    """Warn of weights of the loss function that no optimizer updates."""
    if placed.loss is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    names = placed.loss.own
    without_group = [name for name in names if id(placed.parameters[name]) not in held]
    if without_group and is_main_process():
        warn_at_caller(
            f"the loss function's {listed(without_group)} is in no group of the optimizer, and"
            " stays as it is\n  do: make it from [*model.parameters(), *loss_fn.parameters()], or"
            " give Trainer a function `parameters -> optimizer`;"
            " loss_fn.requires_grad_(False) says that it is meant so",
        )


def user_schedule(
    given: LRScheduler | MakeScheduler | None,
    optimizer: Optimizer,
    training: TrainingConfig,
    metric: str,
) -> TorchSchedule | PlateauSchedule | None:
    """Return the user's scheduler, if any; one such as ReduceLROnPlateau follows `metric`."""
    if given is None:
        return None
    scheduler = given if isinstance(given, LRScheduler) else given(optimizer)
    check_made(scheduler, LRScheduler, given, "Trainer(scheduler=…)")
    if scheduler.optimizer is not optimizer:
        what = f"the {type(scheduler).__name__} is over another optimizer than the trainer's"
        fix = "pass its optimizer to the trainer too, or a function `optimizer -> scheduler`"
        raise UsageError(what, where="Trainer(scheduler=…)", fix=fix)
    asked = {
        "lr_schedule": training.lr_schedule != "constant",
        "warmup_steps": training.warmup_steps > 0,
    }
    if both := next((key for key, is_asked in asked.items() if is_asked), None):
        what = f"the learning rate follows {type(scheduler).__name__} or training.{both}, not both"
        raise UsageError(what, where="Trainer(scheduler=…)", fix=f"write {both}=None")
    return (
        PlateauSchedule(scheduler, metric)
        if isinstance(scheduler, ReduceLROnPlateau)
        else TorchSchedule(scheduler)
    )


def schedule_before_data(
    user_schedule: TorchSchedule | PlateauSchedule | None,
    training: TrainingConfig,
    *,
    own_optimizer: bool,
) -> Schedule | TorchSchedule | None:
    """Return the schedule while the number of steps is unknown: the user's, or the warm-up alone.

    None where steps leave the learning rate alone: that of a user's own optimizer, and one that
    follows a metric.
    """
    if isinstance(user_schedule, TorchSchedule):
        return user_schedule
    if isinstance(user_schedule, PlateauSchedule):
        return None
    if own_optimizer and training.warmup_steps == 0:
        return None
    return Schedule("constant", 0, training.warmup_steps)


def schedule_over(
    user_schedule: TorchSchedule | PlateauSchedule | None,
    training: TrainingConfig,
    total: int | None,
    *,
    own_optimizer: bool,
) -> Schedule | TorchSchedule | None:
    """Return the user's schedule, or the config's; `total`: steps of the run, None if unknown.

    Only one of the two is there (`user_schedule`).
    """
    if total is None and training.lr_schedule != "constant":
        what = (
            f"lr_schedule {training.lr_schedule} needs the number of steps, and the data do not say"
            " their length"
        )
        raise UsageError(
            what, where="training.max_steps", fix="set training.max_steps, or lr_schedule: constant"
        )
    if training.lr_schedule == "constant":
        return schedule_before_data(user_schedule, training, own_optimizer=own_optimizer)
    return Schedule(
        training.lr_schedule,
        total or 0,
        training.warmup_steps,
        training.min_lr_ratio,
        training.wsd_decay_ratio,
    )


AfterUpdate = Callable[[int], None]
"""(updates so far): called on every rank after each update that is not skipped."""


def frozen_until(asked: Mapping[str, int], names: list[str]) -> dict[str, int]:
    """Return the first step that trains each parameter that is frozen at first.

    `asked` has those of modules, too.
    """
    first_steps: dict[str, int] = {}
    for prefix, step in asked.items():
        inside = [
            name for name in names if name == prefix or name.startswith(f"{prefix.rstrip('.')}.")
        ]
        if not inside:
            modules = {name.rpartition(".")[0] for name in names}
            what = (
                f"no parameter is named {prefix}, or lies in a module of that"
                f" name{did_you_mean(prefix, modules)}"
            )
            raise UsageError(
                what,
                where="Trainer(freeze_until=…)",
                fix="write names as model.named_modules() has them",
            )
        first_steps |= {name: max(step, first_steps.get(name, 0)) for name in inside}
    return first_steps


def after_update_calls(
    given: AfterUpdate | list[AfterUpdate] | None,
    freeze_until: Mapping[str, int] | None,
    placed: ParallelModel,
) -> list[AfterUpdate]:
    """Return the calls after each update, attached to the placed model."""
    calls: list[AfterUpdate] = []
    if given is not None:
        calls = given if isinstance(given, list) else [given]
    if placed.local_training is not None and (calls or freeze_until):
        what = f"{'after_update' if calls else 'freeze_until'} is not supported under diloco"
        why = "each worker makes updates of its own, on parameters of its own"
        raise UsageError(what, where="Trainer", why=why, fix="use ddp or fsdp")
    for call in calls:
        if attach := getattr(call, "attach", None):
            attach(placed)
    return calls
