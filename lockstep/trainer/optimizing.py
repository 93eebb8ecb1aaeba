"""The optimizer of a run, its learning rate and its schedule, from what the user gave and what the config says."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from lockstep.config import Config, TrainingConfig
from lockstep.errors import UsageError
from lockstep.optim import (
    CallersRate,
    Schedule,
    TorchSchedule,
    build_optimizer,
    check_shardable,
    rebind,
    refuse_closures,
    scaled_learning_rate,
)
from lockstep.parallel.parallel_model import ParallelModel

MakeOptimizer = Callable[[Any], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


def make_optimizer(
    given: Optimizer | MakeOptimizer | None, before: dict[int, str], placed: ParallelModel, config: Config,
    global_batch_size: int,
) -> tuple[Optimizer, str]:  # fmt: skip
    """An optimizer over the placed parameters, and the line that says its learning rate.

    Args:
        given: an optimizer over the unplaced model, or a function that makes one; None: as the config says.
        before: id of each unplaced parameter → its name.
        global_batch_size: by which the config's learning rate is scaled; a given optimizer brings its own.

    Raises:
        UsageError: it can't work on shards, or the scaling rule lacks its base.
    """
    training = config.training
    rate, line = scaled_rate(training, global_batch_size)
    if given is None:
        optimizer = build_optimizer(
            training.optimizer, placed.parameters.values(), learning_rate=rate, weight_decay=training.weight_decay,
            args=training.optimizer_args, device=placed.random_state.device,
            reproducible=config.distributed.reproducible,
        )  # fmt: skip
    elif isinstance(given, Optimizer):
        rebind(optimizer := given, before, placed.parameters)
    else:
        optimizer = given(list(placed.parameters.values()))
    refuse_closures(optimizer)
    if given is not None:
        line = f"learning rate {optimizer.param_groups[0]['lr']:g}, as {type(optimizer).__name__} says"
    if placed.layout.shard > 1:
        check_shardable(optimizer)
    return optimizer, line


def scaled_rate(training: TrainingConfig, global_batch_size: int) -> tuple[float, str]:
    """The learning rate for this global batch, and the line that says so."""
    return scaled_learning_rate(
        training.learning_rate, training.lr_scaling, global_batch_size, training.base_batch_size
    )  # fmt: skip


def with_batch_size_of(data: Any, config: Config) -> Config:
    """A DataLoader's own batch size stands where the settings name none.

    Raises:
        UsageError: `global_batch_size` is no multiple of it.
    """
    own = getattr(data, "batch_size", None) if isinstance(data, DataLoader) else None
    if own is None or own == config.training.batch_size or "batch_size" in config.training.model_fields_set:
        return config
    whole = config.training.global_batch_size
    if whole is not None and whole % own:
        raise UsageError(
            f"global_batch_size {whole} is not a multiple of the DataLoader's batch_size {own}: "
            f"{whole} = {whole // own} × {own} + {whole % own}",
            where="the training data",
            why="a step is made of whole micro-batches of batch_size samples",
            fix=f"give the DataLoader a batch_size that divides {whole}, or the trainer global_batch_size="
            f"{(whole // own + 1) * own}",
        )
    return config.replaced({"training.batch_size": own})


def user_schedule(
    given: LRScheduler | MakeScheduler | None, optimizer: Optimizer, training: TrainingConfig
) -> TorchSchedule | None:
    """The scheduler that the user gave, if any.

    Raises:
        UsageError: it is another optimizer's, it follows a metric, or the config names a schedule too.
    """
    if given is None:
        return None
    scheduler = given if isinstance(given, LRScheduler) else given(optimizer)
    if scheduler.optimizer is not optimizer:
        raise UsageError(
            f"the {type(scheduler).__name__} is over another optimizer than the trainer's",
            where="Trainer(scheduler=…)",
            fix="pass its optimizer to the trainer too, or a function `optimizer -> scheduler`",
        )
    asked = {"lr_schedule": training.lr_schedule != "constant", "warmup_steps": training.warmup_steps > 0}
    if both := next((key for key, is_asked in asked.items() if is_asked), None):
        raise UsageError(
            f"the learning rate follows {type(scheduler).__name__} or training.{both}, not both",
            where="Trainer(scheduler=…)",
            fix=f"write {both}=None",
        )
    return TorchSchedule(scheduler)


def before_data(training: TrainingConfig, *, own_optimizer: bool) -> Schedule | CallersRate:
    """Return the schedule for as long as the number of steps is not known: the warm-up alone.

    Args:
        own_optimizer: the user made the optimizer; without a warm-up its learning rate is left alone.
    """
    if own_optimizer and training.warmup_steps == 0:
        return CallersRate()
    return Schedule("constant", 0, training.warmup_steps)


def schedule_over(training: TrainingConfig, total: int | None, *, own_optimizer: bool) -> Schedule | CallersRate:
    """Return the config's schedule.

    Args:
        total: steps of the run; None: nobody knows.
        own_optimizer: see `before_data`.

    Raises:
        UsageError: the schedule needs their number.
    """
    if total is None and training.lr_schedule != "constant":
        raise UsageError(
            f"lr_schedule {training.lr_schedule} needs the number of steps, and the data do not say their length",
            where="training.max_steps",
            fix="set training.max_steps, or lr_schedule: constant",
        )
    if training.lr_schedule == "constant":
        return before_data(training, own_optimizer=own_optimizer)
    return Schedule(
        training.lr_schedule, total or 0, training.warmup_steps, training.min_lr_ratio, training.wsd_decay_ratio
    )
