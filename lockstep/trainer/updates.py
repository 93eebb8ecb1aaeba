"""What a user adds around an update: parameters that train only from some step on, and calls after it."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from lockstep.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from lockstep.trainer.trainer import Trainer

AfterUpdate = Callable[[int], None]
"""(updates made so far): called on every rank after each update that is not skipped."""


def frozen_until(asked: Mapping[str, int], names: list[str]) -> dict[str, int]:
    """Return the name of each parameter that is frozen at first → the number of the first step that trains it.

    Args:
        asked: the name of a module or a parameter → that number, counted from 0.
        names: of all parameters, before placement.

    Raises:
        UsageError: there is no such module or parameter.
    """
    found: dict[str, int] = {}
    for prefix, step in asked.items():
        inside = [name for name in names if name == prefix or name.startswith(f"{prefix.rstrip('.')}.")]
        if not inside:
            modules = {name.rpartition(".")[0] for name in names}
            raise UsageError(
                f"no parameter is named {prefix}, or lies in a module of that name{did_you_mean(prefix, modules)}",
                where="Trainer(freeze_until=…)",
                fix="write names as model.named_modules() has them",
            )
        found |= {name: max(step, found.get(name, 0)) for name in inside}
    return found


def set_up(
    trainer: "Trainer", names: list[str], after_update: AfterUpdate | list[AfterUpdate] | None,
    freeze_until: Mapping[str, int] | None,
) -> None:  # fmt: skip
    """Let the trainer's step know what comes around an update.

    Raises:
        UsageError: workers train by themselves, or a frozen module does not exist.
    """
    calls = after_update if isinstance(after_update, list) else [after_update] if after_update is not None else []
    if trainer.placed.local_training is not None and (calls or freeze_until):
        raise UsageError(
            f"{'after_update' if calls else 'freeze_until'} is not supported under diloco",
            where="Trainer",
            why="each worker makes updates of its own, on parameters of its own",
            fix="use ddp or fsdp",
        )
    for call in calls:
        if attach := getattr(call, "attach", None):
            attach(trainer.placed)
    trainer.step.after_update = calls
    trainer.step.frozen_until = frozen_until(freeze_until or {}, names)
