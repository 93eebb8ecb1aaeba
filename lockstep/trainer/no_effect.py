"""Finds settings that someone asked for and that have no effect.

They have none in one of the ways to train, or beside another setting.

What would change a result is an error; of the rest the caller is warned, once, before the first
step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data import DistributedSampler as TorchDistributedSampler

from lockstep.config import Config
from lockstep.data import DistributedSampler, usual_order
from lockstep.errors import NoEffectWarning, UsageError, listed, warn_at_caller
from lockstep.heartbeat.writer import own_heartbeat
from lockstep.layout import Layout
from lockstep.strategy import OPTIONS_OF

_OFF: tuple[Any, ...] = (None, False, "none", "never", [], {})


@dataclass(frozen=True)
class NoEffect:
    """Settings that mean nothing somewhere, and what to do.

    `is_error`: results would not be those asked for.
    """

    keys: tuple[str, ...]
    where: str  # "to Trainer.steps", "without output_dir"
    why: str
    fix: str = "leave it out"
    is_error: bool = False

    def text(self) -> str:
        """Return it as the first line of a message."""
        return (
            f"{', '.join(self.keys)} {'mean' if len(self.keys) > 1 else 'means'} nothing"
            f" {self.where}"
        )


def asked_keys(config: Config, given: Mapping[str, Any]) -> frozenset[str]:
    """Return the dotted keys that someone set.

    A key is set if it differs from its default, or is an argument in Python.

    `given` are the arguments, by dotted key. A section that is off by default is one key.
    """
    asked = set(_different(config, _defaults(), ""))
    for key, value in given.items():
        asked |= set(_leaves(key, value))
    return frozenset(asked)


@cache
def _defaults() -> Config:
    return Config()


def _different(section: BaseModel, default: BaseModel, prefix: str) -> Iterator[str]:
    """Yield the dotted keys whose values differ from the defaults."""
    for name, field in type(section).model_fields.items():
        key = prefix + (field.alias or name)
        value = getattr(section, name)
        usual = getattr(default, name)
        if (
            isinstance(value, BaseModel)
            and isinstance(usual, BaseModel)
            and field.default_factory is not None
        ):
            yield from _different(value, usual, f"{key}.")
        elif value != usual and value not in (None, "none", "never"):
            yield key


def _leaves(key: str, value: Any) -> Iterator[str]:
    from lockstep.config.keys import all_keys

    info = all_keys().get(key)
    if isinstance(value, Mapping) and value and info is not None and info.is_section:
        for name, inside in value.items():
            yield from _leaves(f"{key}.{name}", inside)
        if info.default is None and key in _OPTIONAL:
            yield key
    elif value not in _OFF or (isinstance(value, Mapping) and key in _OPTIONAL):
        yield key


_OPTIONAL = ("training.early_stopping", "monitor.profile", "monitor.prometheus")

_WRITTEN = (
    "checkpoint.save_strategy",
    "checkpoint.save_steps",
    "checkpoint.save_total_limit",
    "checkpoint.async",
    "checkpoint.on_failure",
    "checkpoint.storage",
    "checkpoint.local_cache",
    "checkpoint.memory_steps",
    "monitor.profile",
)
_READING = (
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "persistent_workers",
    "shuffle",
    "order",
    "drop_last",
)
_RATES = (
    "learning_rate",
    "weight_decay",
    "optimizer_args",
    "lr_scaling",
    "base_batch_size",
    "optimizer",
)
_OF_RANKS = (
    "distributed.init_method",
    "distributed.backend",
    "distributed.timeout_seconds",
    "monitor.straggler",
)
_POWERSGD = tuple(
    f"distributed.ddp.compression.{name}"
    for name in ("rank", "start_step", "warm_start", "error_feedback")
)
_TIMES = ("training.eval_steps", "training.eval_strategy")  # of evaluations
STEPS = "to Trainer.steps"
TRAINING_STEP = "to Trainer.training_step"


def report(without_effect: Iterable[NoEffect], asked: frozenset[str], *, is_main: bool) -> None:
    """Raise the first error about keys that are `asked` for, or warn of all of them.

    The warning is at the caller's line.
    """
    lines = []
    unreported = set(asked)
    for each in without_effect:
        keys = tuple(sorted(key for key in unreported if _is_in(key, each.keys)))
        unreported -= set(keys)
        if not keys:
            continue
        each = NoEffect(keys, each.where, each.why, each.fix, each.is_error)
        if each.is_error:
            raise UsageError(each.text(), where=", ".join(keys), why=each.why, fix=each.fix)
        lines.append(f"{each.text()}: {each.why}; {each.fix}")
    if lines and is_main:
        warn_at_caller("\n".join(lines), NoEffectWarning)


def _is_in(key: str, prefixes: tuple[str, ...]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def of_log(names: Sequence[str], *, records: bool) -> str:
    """Return what to say of values that `Trainer.log` was given, and that no sink takes."""
    if records:
        return (
            f"trainer.log keeps nothing of {listed(names)}: no sink takes such values; add jsonl to"
            " monitor.sinks"
        )
    why = "there is no output_dir, and nothing here prints such values"
    fix = 'write Trainer(…, output_dir="runs/mine")'
    return f"trainer.log keeps nothing of {listed(names)}: {why}; {fix}"


# ---- what is known when a trainer or a placed model is made ----


def beside_others(config: Config, layout: Layout) -> Iterator[NoEffect]:
    """Yield the keys that need another one, which is not set, or ranks that this run has not."""
    dependent = (
        *_dependent_in_training(config),
        *_dependent_in_placement(config, layout),
        *_dependent_in_output(config),
    )
    for key, other, is_set in dependent:
        if not is_set:
            yield NoEffect((key,), f"without {other}", f"it belongs to {other}")

    distributed = config.distributed
    if distributed.ddp.compression.kind not in ("powersgd", "auto"):
        where = "without compression.kind: powersgd"
        yield NoEffect(_POWERSGD, where, "they are PowerSGD's")
    if distributed.fsdp.auto_wrap_policy != "size":
        keys = ("distributed.fsdp.min_num_params",)
        yield NoEffect(keys, "without auto_wrap_policy: size", "it is the size of a unit")
    if layout.world_size == 1:
        yield NoEffect(_OF_RANKS, "in one process", "it is about several ranks")
    if own_heartbeat().folder is None:
        yield _without_launcher(layout.world_size)
    yield from _options_of_other_strategies(layout.strategy)


class _DependentKey(NamedTuple):
    """A key that means nothing unless another one is set."""

    key: str
    other: str  # as a message names it
    is_set: bool  # the other one


def _dependent_in_training(config: Config) -> Iterator[_DependentKey]:
    """Yield the dependent keys of `training` and `precision`."""
    training = config.training
    schedule = training.lr_schedule
    bad_numbers = training.bad_numbers
    yield _DependentKey("training.base_batch_size", "lr_scaling", training.lr_scaling != "none")
    yield _DependentKey("training.min_lr_ratio", "an lr_schedule", schedule != "constant")
    decays = schedule == "wsd" or ":" in schedule
    yield _DependentKey("training.wsd_decay_ratio", "lr_schedule: wsd", decays)
    yield _DependentKey(
        "training.gradient_checkpointing_every",
        "gradient_checkpointing: every_n or sequential",
        training.gradient_checkpointing in ("every_n", "sequential"),
    )
    finds_spikes = bad_numbers.spike_factor is not None
    yield _DependentKey("training.bad_numbers.window", "bad_numbers.spike_factor", finds_spikes)
    yield _DependentKey(
        "training.bad_numbers.patience",
        "bad_numbers.action: skip or rollback",
        bad_numbers.action != "stop",
    )
    may_be_fp16 = config.precision.mode in ("fp16", "auto")
    yield _DependentKey("precision.loss_scale", "precision: fp16", may_be_fp16)


def _dependent_in_placement(config: Config, layout: Layout) -> Iterator[_DependentKey]:
    """Yield the dependent keys of `distributed`."""
    distributed = config.distributed
    reproducible = distributed.reproducible
    for name in ("tensor_blocks", "context_blocks", "open_axes"):
        yield _DependentKey(f"distributed.{name}", "reproducible", reproducible)
    cuts_layers = reproducible or layout.tensor > 1
    yield _DependentKey("distributed.sequence_parallel", "tensor_size", cuts_layers)
    cuts_sequences = (distributed.context_size or 1) > 1 or layout.strategy == "context"
    yield _DependentKey("distributed.context_method", "context_size", cuts_sequences)
    checks_replicas = distributed.divergence_check_steps is not None
    yield _DependentKey("distributed.divergence_action", "divergence_check_steps", checks_replicas)


def _dependent_in_output(config: Config) -> Iterator[_DependentKey]:
    """Yield the dependent keys of `checkpoint` and `monitor`."""
    keeps_best = config.checkpoint.keep_best is not None
    yield _DependentKey("checkpoint.keep_best_mode", "keep_best", keeps_best)
    names_experiment = any(
        name in ("wandb", "mlflow") or ":" in name for name in config.monitor.sinks
    )
    yield _DependentKey("monitor.experiment", "the sink wandb or mlflow", names_experiment)


def _without_launcher(world_size: int) -> NoEffect:
    """Return the keys that mean nothing to a process that no launcher of ours has started."""
    # several ranks look themselves for errors that one of them has caught, after so long
    key = "distributed.hang" if world_size == 1 else "distributed.hang.factor"
    where = "to a process that no launcher has started"
    fix = "start it by `lockstep launch` or `lockstep train`, or leave it out"
    return NoEffect((key,), where, "the launcher looks for hangs", fix)


def _options_of_other_strategies(strategy: str) -> Iterator[NoEffect]:
    """Yield the sections of options that a strategy does not use."""
    if ":" in strategy:
        return  # from outside: it may use any
    for section, users in OPTIONS_OF.items():
        if strategy not in users:
            why = f"they are options of {' and '.join(users[:2])}"
            yield NoEffect((f"distributed.{section}",), f"under strategy {strategy}", why)


def of_trainer(
    config: Config,
    layout: Layout,
    *,
    own_optimizer: bool,
    own_schedule: bool,
    has_directory: bool,
    has_memory: bool,
) -> Iterator[NoEffect]:
    """Yield the keys that mean nothing to a trainer in any way to train."""
    yield from beside_others(config, layout)
    if own_optimizer:
        keys = tuple(f"training.{name}" for name in _RATES)
        why = "it brings its own options, so that there would be two of each"
        fix = "leave them out; or give the optimizer by its name, optimizer='adamw'"
        yield NoEffect(keys, "beside an optimizer of your own", why, fix, is_error=True)
    if own_schedule:
        keys = ("training.min_lr_ratio", "training.wsd_decay_ratio")
        yield NoEffect(keys, "beside a scheduler of your own", "the rate follows the scheduler")
    if not has_directory:
        yield from _without_directory(config)
    elif config.checkpoint.local_cache and config.bucket is None:
        why = "a cache is for checkpoints in a bucket, and these are on a disk, or elsewhere"
        fix = "set checkpoint.storage to s3://BUCKET/PREFIX, or leave local_cache out"
        yield NoEffect(("checkpoint.local_cache",), "without a bucket", why, fix, is_error=True)
    if not has_memory:
        why = "the copies are for ranks that Lockstep's launcher starts again"
        fix = "add --max-restarts N to `lockstep train` or `lockstep launch`, or leave it out"
        yield NoEffect(
            ("checkpoint.memory_steps",), "to ranks that are not started again", why, fix
        )


def _without_directory(config: Config) -> Iterator[NoEffect]:
    """Yield the settings of what is written, or read again, where there is no run directory."""
    nowhere = "without output_dir"
    fix = "write Trainer(…, output_dir=DIR), or leave it out"
    best = ("checkpoint.keep_best", "checkpoint.load_best")
    yield NoEffect(
        best, nowhere, "no checkpoint is kept that could be the best", fix, is_error=True
    )
    if config.training.bad_numbers.action == "rollback":
        why = "there is no checkpoint to go back to"
        yield NoEffect(
            ("training.bad_numbers.action",),
            nowhere,
            why,
            f"{fix} (action: skip needs none)",
            is_error=True,
        )
    yield NoEffect(_WRITTEN, nowhere, "nothing is written", fix)
    if config.checkpoint.resume == "auto":
        yield NoEffect(("checkpoint.resume",), nowhere, "there is nothing to resume from", fix)
    from lockstep.monitor.sinks import sink_named

    left_out = [
        name
        for name in config.monitor.sinks
        if getattr(sink_named(name), "needs_run_directory", False)
    ]
    if left_out:
        yield NoEffect(("monitor.sinks",), nowhere, f"{', '.join(left_out)} write into it", fix)


# ---- what is known when it trains ----


def of_way(config: Config, where: str) -> Iterator[NoEffect]:
    """Yield the keys that mean nothing in a loop of the caller's own."""
    why = "evaluations are the loop's own: trainer.evaluate(val_data) in it counts"
    yield NoEffect(_TIMES, where, why)
    if where != TRAINING_STEP:
        return
    reading = tuple(f"data.{name}" for name in _READING)
    yield NoEffect(
        reading,
        where,
        "the loop itself reads the data",
        "leave it out, and give it to your DataLoader",
    )
    loops = "the loop itself goes through the data"
    fix = "write max_steps, and end the loop where trainer.done is true; or use Trainer.steps(data)"
    yield NoEffect(("training.num_train_epochs",), where, loops, fix, is_error=True)
    if config.checkpoint.save_strategy == "epoch":
        fix = "write save_strategy='steps', or use Trainer.steps(data)"
        yield NoEffect(("checkpoint.save_strategy",), where, loops, fix, is_error=True)
    if config.training.bad_numbers.action == "rollback":
        why = f"{loops}, which can't be rewound"
        fix = "write action='skip', or use Trainer.steps(data)"
        yield NoEffect(("training.bad_numbers.action",), where, why, fix, is_error=True)
    why = "its micro-batches are gone when a step is found bad"
    fix = "leave it out, or use Trainer.steps(data)"
    yield NoEffect(("training.bad_numbers.recompute",), where, why, fix, is_error=True)
    fix = (
        "call trainer.load_checkpoint(trainer.best_checkpoint) after the loop, or use"
        " Trainer.steps(data)"
    )
    yield NoEffect(
        ("checkpoint.load_best",), where, "it does not see the end of the loop", fix, is_error=True
    )


def of_unrecorded_loop() -> Iterator[NoEffect]:
    """Yield the key that means nothing to a loop whose steps are neither recorded nor printed."""
    fix = "write Trainer(…, output_dir=DIR), trainer.steps(data, progress=True), or leave it out"
    yield NoEffect(
        ("monitor.log_steps",), "to a loop without output_dir", "its steps are not recorded", fix
    )


def beside_data(config: Config, data: Any) -> Iterator[NoEffect]:
    """Yield the keys about reading that have no effect, because the data decide them.

    The data are a DataLoader, or are iterated.
    """
    fix = "leave it out, or give a dataset instead of a loader"
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        ours = ("shuffle", "order")
        own = {name: getattr(data, name, None) for name in _READING if name not in ours}
        differ = [name for name, value in own.items() if getattr(config.data, name) != value]
        shuffles = type(data.sampler).__name__ == "RandomSampler" or bool(
            getattr(data.sampler, "shuffle", False)
        )
        differ += ["shuffle"] * (config.data.shuffle != shuffles)
        keys = tuple(f"data.{name}" for name in differ)
        yield NoEffect(
            keys, "beside a DataLoader", "how samples are read is the DataLoader's to say", fix
        )
    elif not (hasattr(data, "__getitem__") and hasattr(data, "__len__")) or isinstance(
        data, list | tuple | DataLoader
    ):
        keys = tuple(f"data.{name}" for name in _READING)
        yield NoEffect(
            keys, "for data that are iterated", "they come as they are, in their own order", fix
        )


def unused_of_loader(data: Any) -> str | None:
    """Return a sentence on a DataLoader's own seed, which is not used.

    The order follows from `training.seed`.
    """
    if not isinstance(data, DataLoader):
        return None
    sampler: Any = data.sampler
    if type(sampler) in (TorchDistributedSampler, DistributedSampler) and sampler.seed:
        return (
            f"the DistributedSampler's seed {sampler.seed} means nothing: the order follows from"
            " training.seed"
        )
    generator = data.generator or getattr(sampler, "generator", None)
    if type(sampler) is RandomSampler and generator is not None and usual_order(data) is not None:
        return "the DataLoader's generator means nothing: the order follows from training.seed"
    return None


def of_validation(config: Config, val_data: Any, advice: str) -> Iterator[NoEffect]:
    """Yield the keys about evaluations that mean nothing to these data, or without any.

    `advice` says how this way to train gets validation data.
    """
    if val_data is None:
        keys = (*_TIMES, "training.eval_batches", "training.eval_batch_size")
        yield NoEffect(keys, "without validation data", "nothing is evaluated", advice)
    own = getattr(val_data, "batch_size", None)
    if isinstance(val_data, list | tuple) or (
        own is not None and own != config.training.eval_batch_size
    ):
        why = "the samples come in batches of their own"
        yield NoEffect(("training.eval_batch_size",), "beside a DataLoader for validation", why)
