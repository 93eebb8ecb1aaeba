"""What is said beside the model: single keys of the config by their short names, and the loss that a config names."""

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.config import Config, ObjectSpec, build_object, config_from
from lockstep.config.flags import apply_flags
from lockstep.config.objects import check_object
from lockstep.errors import UsageError
from lockstep.registry import load_object


def with_settings(config: Config, settings: Mapping[str, Any]) -> Config:
    """`config` with some keys replaced.

    Args:
        settings: short name (`batch_size`, as `--batch-size`) → value.

    Raises:
        UsageError: an unknown name (the nearest is named), a wrong value, a contradiction.
    """
    return config_from(apply_flags(settings), config) if settings else config


def loss_fn_of(config: Config) -> Callable[..., Any] | None:
    """The loss that the config names; None: the model's own.

    Raises:
        UsageError: it can't be imported, or does not take its arguments.
    """
    spec = config.loss_fn
    if spec is None:
        return None
    found: Callable[..., Any] = check_loss_fn(spec)
    return build_object(spec, "loss_fn") if isinstance(found, type) else found


def check_loss_fn(spec: ObjectSpec) -> Any:
    """What the spec of a loss names, once it is known to take its arguments; nothing is made.

    Raises:
        UsageError: as `loss_fn_of` would.
    """
    found = load_object(spec.name, "loss_fn")
    if isinstance(found, type):
        return check_object(spec, "loss_fn")
    if spec.args or spec.positional:
        raise UsageError(
            f"{spec.name} is no class, and its arguments are outputs and targets",
            where="loss_fn.args",
            fix="leave args out, or name a class that takes them, whose objects are called with outputs and targets",
        )
    return found
