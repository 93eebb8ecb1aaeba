"""Compares a run's settings with those of the checkpoint from which it goes on.

A run that resumes with other samples or another model is another training; a learning rate or a
number of steps may be changed on purpose.

Tests: tests/trainer/test_resume.py
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep import checkpoint
from lockstep.config import Config, TrainingConfig
from lockstep.config.tree import Origin, parse
from lockstep.data import StepSource
from lockstep.errors import UsageError
from lockstep.monitor.figures import gather_objects
from lockstep.optim import Schedule

_COMPARED = (
    *(
        "model.",
        "loss_fn",
        "data.",
        "training.",
        "precision.",
        "distributed.reproducible",
        "distributed.open_axes",
    ),
    *("distributed.context_blocks", "distributed.tensor_blocks", "distributed.sequence_parallel"),
)
_HOW_DATA_ARE_READ = (
    "data.num_workers",
    "data.prefetch_factor",
    "data.pin_memory",
    "data.persistent_workers",
)
_ANOTHER_TRAINING = ("model.", "data.", "training.seed")
_SIZES = (
    "training.batch_size",
    "training.gradient_accumulation_steps",
    "training.global_batch_size",
)
_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A key with another value."""

    key: str
    before: Any
    now: Any
    another_training: bool

    def __str__(self) -> str:
        before, now = (
            json.dumps(value, ensure_ascii=False, default=str) for value in (self.before, self.now)
        )
        return f"{self.key} {before} → {now}"


def compare(
    config: Config, global_batch_size: int, saved: checkpoint.CheckpointPath, *, is_main: bool
) -> list[Change]:
    """Return the keys that differ from a checkpoint's, read by rank 0.

    A UsageError if they make another training.
    """
    mine = list(_changes(config, global_batch_size, saved)) if is_main else []
    changes: list[Change] = gather_objects(mine)[0]
    broken = [change for change in changes if change.another_training]
    if broken and not config.checkpoint.allow_changes:
        raise another_training(", ".join(map(str, broken)), saved)
    return changes


def require_same_epoch(
    source: StepSource, global_batch_size: int, saved: checkpoint.CheckpointPath
) -> None:
    """Reject data of another length than the checkpoint's run had: their order differs too."""
    state = checkpoint.read_state(saved)
    now = source.steps_per_epoch
    before = state.get("steps_per_epoch")
    if before is None or now is None or state.get("global_batch_size") != global_batch_size:
        return
    if before != now:
        source.close()
        raise another_training(f"an epoch of the data had {before} steps, and has {now} now", saved)


def another_training(what: str, saved: checkpoint.CheckpointPath) -> UsageError:
    """Return the error for resuming from a checkpoint of another training."""
    why = (
        "samples, their order, random numbers and the model follow from the config and the step"
        " number, so this would be another training from here on"
    )
    fix = (
        "give the former value back; or start afresh with --resume never (in Python:"
        " resume='never'); or go on all the same with --allow-changes (in Python:"
        " allow_changes=True)"
    )
    return UsageError(
        f"the run would not go on as it began: {what}",
        where=f"resuming from {saved}",
        why=why,
        fix=fix,
    )


def _changes(
    config: Config, global_batch_size: int, saved: checkpoint.CheckpointPath
) -> Iterator[Change]:
    """Yield the settings whose values differ from those that a checkpoint was saved with.

    A batch size that neither run has set is not compared: the data bring it.
    """
    text = checkpoint.config_text(saved)
    now = _flat(config.to_dict())
    before = now
    if text != config.to_yaml():  # in a restart it is the same, and parsing takes a while
        before = _flat(parse(text, lambda line: Origin(str(saved), line + 1)).plain())
    training = config.training
    whole = checkpoint.read_state(saved).get("global_batch_size")
    open_yet = config.model.name is None and "batch_size" not in training.model_fields_set
    sizes_differ = any(_differs(before, now, key) for key in _SIZES) and not open_yet
    grows = whole is not None and whole != global_batch_size and not open_yet
    # Objects that are passed in Python cannot be compared by name.
    objects = [
        part
        for part in ("model", "data")
        if None in (before.get(f"{part}.name"), now.get(f"{part}.name"))
    ]
    handed_over = tuple(f"{part}.{key}" for part in objects for key in ("name", "args"))
    for key in sorted({*before, *now}):
        if (
            _differs(before, now, key)
            and not (open_yet and key in _SIZES)
            and not key.startswith(handed_over)
        ):
            another = key.startswith(_ANOTHER_TRAINING) or (key in _SIZES and grows)
            yield Change(key, before.get(key), now.get(key), another)
    # no key was changed, but the number of ranks, as after the loss of a machine
    if grows and not sizes_differ:
        key = "the global batch (it follows the ranks: set global_batch_size)"
        yield Change(key, whole, global_batch_size, another_training=False)


def _differs(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> bool:
    """Return whether a relevant key has another value.

    A key that the saving version lacks has not changed.
    """
    if not key.startswith(_COMPARED) or key in _HOW_DATA_ARE_READ:
        return False
    if key.startswith("model.lora"):  # a section that a config leaves out is null
        return before.get(key) != now.get(key)
    free = key.startswith(("model.args.", "data.args.", "training.optimizer_args.", "loss_fn"))
    if not free and (key not in before or key not in now):
        return False
    return bool(before.get(key, _ABSENT) != now.get(key, _ABSENT))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree} if prefix else {}
    return {
        k: v
        for key, child in tree.items()
        for k, v in _flat(child, f"{prefix}.{key}" if prefix else key).items()
    }


_SCHEDULE = (
    "max_steps",
    "num_train_epochs",
    "lr_schedule",
    "warmup_steps",
    "min_lr_ratio",
    "wsd_decay_ratio",
)


def moved_schedule(
    training: TrainingConfig,
    changes: list[Change],
    updates: int,
    rate: float,
    steps_per_epoch: int | None,
) -> list[str]:
    """Return a line on the next learning rate, if changes move it.

    A cosine, for example, depends on the number of steps.
    """
    before = {change.key.removeprefix("training."): change.before for change in changes}
    earlier = training.model_copy(update={key: before[key] for key in _SCHEDULE if key in before})
    rates = []
    described = []
    for config in (training, earlier):
        total = config.max_steps or (config.num_train_epochs or 1) * (steps_per_epoch or 0)
        if total == 0:
            return []
        kind = config.lr_schedule
        warmup = config.warmup_steps
        schedule = Schedule(kind, total, warmup, config.min_lr_ratio, config.wsd_decay_ratio)
        rates.append(f"{rate * schedule.factor(updates):.3g}")
        described.append(
            f"{kind} over {total} steps" + (f", {warmup} of them warm-up" if warmup else "")
        )
    if rates[0] == rates[1]:
        return []
    return [
        f"the learning rate follows another curve from here on ({described[0]}; before:"
        f" {described[1]}): step {updates + 1} takes {rates[0]} in place of {rates[1]}"
    ]
