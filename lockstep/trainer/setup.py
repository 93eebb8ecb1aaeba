"""Builds the parts of a trainer from the user's arguments and the config.

Tests: tests/trainer/test_settings.py, tests/trainer/test_arguments.py,
tests/trainer/test_every_setting.py
"""

import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from lockstep import optim
from lockstep.collectives import is_main_process
from lockstep.config import (
    Config,
    DistributedConfig,
    ObjectSpec,
    TrainingConfig,
    build_object,
    check,
    config_from,
    require_equation,
)
from lockstep.config.schema_training import check_object
from lockstep.data import StepSource, adopt, counted_samples, require_data
from lockstep.errors import UsageError, did_you_mean, listed
from lockstep.heartbeat import write_limits
from lockstep.models.loss_modules import hidden_parameters, own_weights
from lockstep.models.protocol import Objective
from lockstep.models.torch_losses import class_of
from lockstep.optim import CallersRate, PlateauSchedule, Schedule, TorchSchedule
from lockstep.parallel.initial import canonical_names
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.parallel.strides import lay_states
from lockstep.registry import load_object, require_call
from lockstep.trainer.arguments import check_made

MakeOptimizer = Callable[[Any], Optimizer]
MakeScheduler = Callable[[Optimizer], LRScheduler]


@dataclass(frozen=True)
class Unplaced:
    """The parameters before they are placed."""

    names: dict[int, str]  # id → canonical name, of the model's and of its loss function's
    of_loss: list[nn.Parameter]  # those of the loss function
    hidden: list[nn.Parameter]  # that a loss function holds which is no module

    @classmethod
    def of(cls, model: nn.Module, objective: Objective, loss_fn: Any) -> "Unplaced":
        """Return those of a model and a loss function."""
        names, _ = canonical_names(model)
        own = {} if objective.module is None else own_weights(objective.module, model)
        hidden = [p for p in hidden_parameters(loss_fn) if id(p) not in names]
        return cls(names | {id(p): name for name, p in own.items()}, list(own.values()), hidden)


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
            placed.parameters.values(),
            learning_rate=rate,
            weight_decay=training.weight_decay,
            args=training.optimizer_args,
            device=placed.random_state.device,
            reproducible=config.distributed.reproducible,
        )
    elif isinstance(given, Optimizer):
        optim.rebind(optimizer := given, before.names, placed.parameters)
        lay_states(optimizer)
    else:

        def make(parameters: Any) -> Optimizer:
            made = given(parameters)
            check_made(made, Optimizer, given, "Trainer(optimizer=…)")
            return made

        optimizer = optim.made_by(make, placed.parameters, before.names, before.of_loss)
    _warn_of_untrained(optimizer, placed)
    optim.check_no_closure(optimizer)
    if given is not None:
        line = (
            f"learning rate {optimizer.param_groups[0]['lr']:g}, as {type(optimizer).__name__} says"
        )
    if placed.layout.shard > 1:
        optim.check_shardable(optimizer)
    return optimizer, line


def _warn_of_untrained(optimizer: Optimizer, placed: ParallelModel) -> None:
    """Warn of weights of the loss function that no optimizer updates."""
    if placed.loss is None:
        return
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    left = [name for name in placed.loss.own if id(placed.parameters[name]) not in held]
    if left and is_main_process():
        warnings.warn(
            f"the loss function's {listed(left)} is in no group of the optimizer, and stays as it"
            " is\n  do: make it from [*model.parameters(), *loss_fn.parameters()], or give Trainer"
            " a function `parameters -> optimizer`; loss_fn.requires_grad_(False) says that it is"
            " meant so",
            stacklevel=4,
        )


def with_batch_size_of(data: Any, config: Config) -> Config:
    """Return the config with the batch size of a DataLoader, or of a list of batches, if the settings have none."""
    require_data(data)
    own = (
        getattr(data, "batch_size", None) if isinstance(data, DataLoader) else _size_of_first(data)
    )
    if own is None or own == config.training.batch_size:
        return config
    if "batch_size" in config.training.model_fields_set:
        # a DataLoader's is compared where its order is taken over
        if not isinstance(data, DataLoader):
            require_batch_size(own, config.training.batch_size)
        return config
    if config.training.batch_norm_samples is not None:  # the ranks of a row have been counted
        what = (
            "batch_norm_samples is made of micro-batches of batch_size, and the DataLoader has its"
            f" own: {own}"
        )
        raise UsageError(
            what, where="training.batch_norm_samples", fix=f"give the trainer batch_size={own}, too"
        )
    whole = config.training.global_batch_size
    if whole is not None and whole % own:
        equation, more = (
            f"{whole} = {whole // own} × {own} + {whole % own}",
            (whole // own + 1) * own,
        )
        what = (
            f"global_batch_size {whole} is not a multiple of the DataLoader's batch_size {own}:"
            f" {equation}"
        )
        why = "a step is made of whole micro-batches of batch_size samples"
        fix = (
            f"give the DataLoader a batch_size that divides {whole}, or the trainer"
            f" global_batch_size={more}"
        )
        raise UsageError(what, where="the training data", why=why, fix=fix)
    return config.replaced({"training.batch_size": own})


def _size_of_first(data: Any) -> int | None:
    """Return the samples in the first batch of a list of batches.

    None for other data, and of batches without any.
    """
    return counted_samples(data[0]) if isinstance(data, list | tuple) and data else None


def require_batch_size(own: int, batch_size: int) -> None:
    """Reject batches of another size than the settings say: steps and learning rates would be of another batch."""
    if own != batch_size:
        what = f"the first batch has {own} samples, and training.batch_size is {batch_size}"
        fix = f"give the trainer batch_size={own}, or batches of {batch_size}"
        raise UsageError(
            what, where="the training data", why="both mean the samples in a micro-batch", fix=fix
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
    training: TrainingConfig, *, own_optimizer: bool
) -> Schedule | CallersRate:
    """Return the schedule while the number of steps is unknown: the warm-up alone, or a user's own optimizer's rate."""
    if own_optimizer and training.warmup_steps == 0:
        return CallersRate()
    return Schedule("constant", 0, training.warmup_steps)


def schedule_over(
    training: TrainingConfig, total: int | None, *, own_optimizer: bool
) -> Schedule | CallersRate:
    """Return the config's schedule; `total`: steps of the run, None if unknown."""
    if total is None and training.lr_schedule != "constant":
        what = (
            f"lr_schedule {training.lr_schedule} needs the number of steps, and the data do not say"
            " their length"
        )
        raise UsageError(
            what, where="training.max_steps", fix="set training.max_steps, or lr_schedule: constant"
        )
    if training.lr_schedule == "constant":
        return schedule_before_data(training, own_optimizer=own_optimizer)
    return Schedule(
        training.lr_schedule,
        total or 0,
        training.warmup_steps,
        training.min_lr_ratio,
        training.wsd_decay_ratio,
    )


def with_settings(config: Config, dotted: Mapping[str, Any]) -> Config:
    """Return `config` with the values of some dotted keys replaced."""
    if dotted:
        return config_from(dotted, config)
    check(config)
    return config


def loss_fn_of(config: Config) -> Callable[..., Any] | None:
    """Return the config's loss; None: the model's own."""
    spec = config.loss_fn
    if spec is None:
        return None
    found: Callable[..., Any] = check_loss_fn(spec)
    return build_object(_of_class(spec), "loss_fn") if isinstance(found, type) else found


def check_loss_fn(spec: ObjectSpec) -> Any:
    """Return the object named by a loss's spec, after checking that it accepts its arguments.

    Nothing is created.
    """
    spec = _of_class(spec)
    found = load_object(spec.name, "loss_fn")
    if isinstance(found, type):
        call = "forward" if issubclass(found, nn.Module) else "__call__"
        if call not in dir(found):
            fix = "give the class __call__(self, outputs, targets)"
            raise UsageError(f"objects of {spec.name} can't be called", where="loss_fn", fix=fix)
        require_call(
            getattr(found, call), ("self", "outputs", "targets"), f"{spec.name}.{call}", "loss_fn"
        )
        return check_object(spec, "loss_fn")
    require_call(found, ("outputs", "targets"), spec.name, "loss_fn")
    if spec.args or spec.positional:
        what = f"{spec.name} is not a class, and its arguments are outputs and targets"
        fix = (
            "leave args out, or name a class that takes them, whose objects are called with outputs"
            " and targets"
        )
        raise UsageError(what, where="loss_fn.args", fix=fix)
    return found


def _of_class(spec: ObjectSpec) -> ObjectSpec:
    """Return the spec of the class that does what a loss function of torch's does.

    Any other spec itself.
    """
    found = class_of(load_object(spec.name, "loss_fn"))
    return spec if found is None else spec.model_copy(update={"name": f"torch.nn:{found.__name__}"})


AfterUpdate = Callable[[int], None]
"""(updates so far): called on every rank after each update that is not skipped."""


def frozen_until(asked: Mapping[str, int], names: list[str]) -> dict[str, int]:
    """Return the first step that trains each parameter that is frozen at first.

    `asked` has those of modules, too.
    """
    found: dict[str, int] = {}
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
        found |= {name: max(step, found.get(name, 0)) for name in inside}
    return found


def after_update_calls(
    given: AfterUpdate | list[AfterUpdate] | None,
    freeze_until: Mapping[str, int] | None,
    placed: ParallelModel,
) -> list[AfterUpdate]:
    """Return the calls after each update, attached to the placed model."""
    calls = given if isinstance(given, list) else [given] if given is not None else []
    if placed.local_training is not None and (calls or freeze_until):
        what = f"{'after_update' if calls else 'freeze_until'} is not supported under diloco"
        why = "each worker makes updates of its own, on parameters of its own"
        raise UsageError(what, where="Trainer", why=why, fix="use ddp or fsdp")
    for call in calls:
        if attach := getattr(call, "attach", None):
            attach(placed)
    return calls


def write_hang_limits(config: DistributedConfig) -> None:
    """Tell the launcher when a rank of this run counts as hanging."""
    write_limits(config.hang.factor, config.hang.seconds, config.timeout_seconds)


def require_one_length(config: Config, epochs: int | None) -> None:
    """Reject `epochs` in a call beside another number of epochs in the settings."""
    length = config.training.num_train_epochs
    if epochs is not None and length is not None and epochs != length:
        what = f"the run can't have both {length} epochs and {epochs}"
        raise UsageError(
            what, where="training.num_train_epochs, epochs=", fix="keep one of the two"
        )


def data_workers(data: Any, config: Config) -> int:
    """Return the number of workers that read the data: a DataLoader's own, or those of the config."""
    if isinstance(data, DataLoader):
        return data.num_workers
    return (
        config.data.num_workers
        if hasattr(data, "__getitem__") and not isinstance(data, list | tuple)
        else 0
    )


def given_in_python(model: nn.Module | None, optimizer: Optimizer | None) -> dict[str, str]:
    """Return what a config does not say of a run that a script has made, in words: to compare runs by it."""
    given = {} if model is None else {"model": type(model).__name__}
    if optimizer is not None:
        settings = {**optimizer.defaults, "lr": optimizer.param_groups[0].get("initial_lr")}
        named = ", ".join(
            f"{key}={value}"
            for key, value in settings.items()
            if value and not isinstance(value, bool)
        )
        given["optimizer"] = f"{type(optimizer).__name__}({named})"
    if Path(sys.argv[0]).name not in ("__main__.py", "lockstep"):
        given["arguments"] = shlex.join(sys.argv[1:])[:200]
    return given


def open_source(
    data: Any,
    config: Config,
    placed: ParallelModel,
    *,
    epochs: int | None,
    global_batch_size: int,
    start_step: int,
    position: dict[str, Any],
) -> tuple[StepSource, int | None]:
    """Return the steps from `start_step` on, and the number of the last one, if it is known.

    `epochs` (unset: the config's) are those of the whole run; `position` counts if it does not
    follow from the steps.
    """
    training = config.training
    require_equation(training, placed.layout.batch_shares)
    epochs = epochs or (None if training.max_steps else training.num_train_epochs or 1)
    source = adopt(
        data,
        config.data,
        batch_size=training.batch_size,
        global_batch_size=global_batch_size,
        assign=placed.assign,
        start_step=start_step,
        stop_step=training.max_steps,
        epochs=epochs,
        seed=training.seed,
        device=placed.random_state.device,
        wanted=placed.wants_data,
        state=position,
        reproducible=placed.reproducible,
    )
    by_epochs = source.steps_per_epoch * epochs if source.steps_per_epoch and epochs else None
    bounds = [bound for bound in (training.max_steps, by_epochs) if bound is not None]
    return source, min(bounds, default=None)  # unknown if only the end of the data shows it


class PlacementSettings(TypedDict, total=False):
    """Keyword arguments of `lockstep.place`: keys about the model and the ranks, for editors and mypy.

    A test compares names and types; `precision` is `precision.mode`, and a section is a mapping of
    its keys.
    """

    gradient_checkpointing: Literal["none", "full", "selective", "every_n", "sequential"]
    gradient_checkpointing_every: int
    compile: bool
    seed: int
    precision: Literal["auto", "fp32", "bf16", "fp16"] | Mapping[str, Any]
    param_dtype: Literal["fp32", "bf16"]
    fp8: Literal["none", "linears", "emulated"]
    tf32: bool
    loss_scale: Mapping[str, Any]
    device: str
    backend: Literal["auto", "nccl", "xccl", "gloo", "mpi"]
    init_method: str
    timeout_seconds: float
    hang: Mapping[str, Any]
    debug: Literal["none", "info", "detail"]
    env: Mapping[str, Any]
    reproducible: bool
    buffers: Mapping[str, Any]
    divergence_check_steps: int | None
    divergence_action: Literal["stop", "repair"]
    replicate_size: int | None
    shard_size: int | None
    pipeline_size: int | None
    context_size: int | None
    open_axes: list[Literal["tensor", "context"]]
    context_blocks: int | None
    context_method: Literal["gathered", "all_to_all", "ring"]
    tensor_size: int | None
    expert_size: int | None
    sequence_parallel: bool | None
    tensor_blocks: int | None
    ddp: Mapping[str, Any]
    fsdp: Mapping[str, Any]
    pipeline: Mapping[str, Any]
    accelerate: Mapping[str, Any]
    diloco: Mapping[str, Any]
    distributed: Mapping[str, Any]


class TrainerSettings(PlacementSettings, total=False):
    """All keys of a `Trainer`."""

    strategy: str
    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool
    shuffle: bool
    drop_last: bool
    max_steps: int | None
    num_train_epochs: int | None
    batch_size: int
    batch_norm_samples: int | None
    eval_batch_size: int | None
    eval_batches: int | None
    gradient_accumulation_steps: int | None
    global_batch_size: int | None
    optimizer_args: Mapping[str, Any]
    learning_rate: float
    lr_schedule: str | None
    lr_scaling: Literal["none", "linear", "sqrt"]
    base_batch_size: int | None
    warmup_steps: int | None
    min_lr_ratio: float
    wsd_decay_ratio: float
    weight_decay: float | None
    gradient_clip: float | Mapping[str, Any] | None
    bad_numbers: Mapping[str, Any]
    eval_steps: int | None
    eval_strategy: Literal["steps", "epoch"]
    early_stopping: Mapping[str, Any] | None
    save_strategy: Literal["steps", "epoch", "none"]
    save_steps: int
    save_total_limit: int | None
    keep_best: str | None
    keep_best_mode: Literal["min", "max"]
    load_best: bool
    format: Literal["sharded", "full", "local"]
    storage: str | Mapping[str, Any] | None
    retries: int
    on_failure: Literal["continue", "stop"]
    resume: str
    allow_changes: bool
    log_steps: int
    sinks: Sequence[str]
    # in Python also functions and objects
    callbacks: Sequence[str | Mapping[str, Any] | Callable[..., Any] | Any]
    profile: Mapping[str, Any] | None
    memory: Mapping[str, Any]
    straggler: Mapping[str, Any]
    prometheus: Mapping[str, Any] | None
    gradient_norms: bool
    experiment: str | None
    training: Mapping[str, Any]
    data: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    monitor: Mapping[str, Any]
