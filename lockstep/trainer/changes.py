"""What a resumed run was told otherwise than the run that saved: listed, and refused where it is another training.

A checkpoint holds the config that it was saved under. Samples, their order, random numbers and the model follow from
it and the step number alone, so a run that goes on under another seed, other data, another global batch or another
model is not the training that began; a learning rate or a number of steps may be changed on purpose.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep import checkpoint
from lockstep.config.tree import Origin, parse
from lockstep.errors import UsageError
from lockstep.monitor.over_ranks import gather_objects

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

_COMPARED = ("model.", "loss_fn", "data.", "training.", "precision.", "distributed.reproducible")
_HOW_DATA_ARE_READ = ("data.num_workers", "data.prefetch_factor", "data.pin_memory", "data.persistent_workers")
_ANOTHER_TRAINING = ("model.", "data.", "training.seed")
_SIZES = ("training.batch_size", "training.gradient_accumulation_steps", "training.global_batch_size")
_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """One key that differs."""

    key: str
    before: Any
    now: Any
    another_training: bool

    def __str__(self) -> str:
        return f"{self.key} {_shown(self.before)} → {_shown(self.now)}"


def compare(trainer: "Trainer", found: checkpoint.CheckpointPath) -> list[Change]:
    """What differs, as rank 0 reads it, which may be the only one that sees the checkpoint; all ranks call it.

    Raises:
        UsageError: the run would go on as another training, and nobody said that it may.
    """
    mine = list(_changes(trainer, found)) if trainer.is_main_process else []
    changes: list[Change] = gather_objects(mine)[0]
    broken = [change for change in changes if change.another_training]
    if broken and not trainer.config.checkpoint.allow_changes:
        raise another_training(", ".join(map(str, broken)), found)
    return changes


def another_training(what: str, found: checkpoint.CheckpointPath) -> UsageError:
    """The refusal to go on from a checkpoint of another training."""
    return UsageError(
        f"the run would not go on as it began: {what}",
        where=f"resuming from {found}",
        why="samples, their order, random numbers and the model follow from the config and the step number, so this "
        "would be another training from here on",
        fix="give the former value back; or start afresh with --resume never (in Python: resume='never'); or go on "
        "all the same with --allow-changes (in Python: allow_changes=True)",
    )


def _changes(trainer: "Trainer", found: checkpoint.CheckpointPath) -> Iterator[Change]:
    before = _flat(parse(checkpoint.config_text(found), lambda line: Origin(str(found), line + 1)).plain())
    now = _flat(trainer.config.to_dict())
    training = trainer.config.training
    whole = checkpoint.read_state(found).get("global_batch_size")
    open_yet = trainer.config.model.name is None and "batch_size" not in training.model_fields_set
    sizes_differ = any(_differs(before, now, key) for key in _SIZES) and not open_yet
    grows = whole is not None and whole != trainer.global_batch_size and not open_yet
    # Objects that are handed over in Python can not be compared by name.
    objects = [part for part in ("model", "data") if None in (before.get(f"{part}.name"), now.get(f"{part}.name"))]
    handed_over = tuple(f"{part}.{key}" for part in objects for key in ("name", "args"))
    for key in sorted({*before, *now}):
        if _differs(before, now, key) and not (open_yet and key in _SIZES) and not key.startswith(handed_over):
            another = key.startswith(_ANOTHER_TRAINING) or (key in _SIZES and grows)
            yield Change(key, before.get(key), now.get(key), another)
    if grows and not sizes_differ:  # nobody changed a key: other ranks are here, as after the loss of a machine
        yield Change("the global batch (it follows the ranks: set global_batch_size)", whole,
                     trainer.global_batch_size, another_training=False)  # fmt: skip


def _differs(before: Mapping[str, Any], now: Mapping[str, Any], key: str) -> bool:
    """Whether a key that counts has another value. One that the saving version did not have yet has not changed."""
    if not key.startswith(_COMPARED) or key in _HOW_DATA_ARE_READ:
        return False
    free = key.startswith(("model.args.", "data.args.", "training.optimizer_args.", "loss_fn"))
    if not free and (key not in before or key not in now):
        return False
    return bool(before.get(key, _ABSENT) != now.get(key, _ABSENT))


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys → values; empty containers have none."""
    if not isinstance(tree, dict):
        return {prefix: tree} if prefix else {}
    return {k: v for key, child in tree.items() for k, v in _flat(child, f"{prefix}.{key}" if prefix else key).items()}


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def keep_what_was_changed(groups: list[dict[str, Any]], fresh: list[dict[str, Any]], changes: list[Change]) -> None:
    """Give the options of an optimizer that the config makes their new values, over those of the checkpoint.

    Args:
        groups: as the checkpoint filled them.
        fresh: as the config made them.
    """
    keys = {change.key for change in changes}
    names = [key.removeprefix("training.optimizer_args.") for key in keys if key.startswith("training.optimizer_args.")]
    if keys & {"training.learning_rate", "training.lr_scaling", "training.base_batch_size"}:
        names += ["lr", "initial_lr"]
    if "training.weight_decay" in keys:
        names.append("weight_decay")
    for group, new in zip(groups, fresh, strict=True):
        group.update({name: new[name] for name in names if name in new})
