"""Makes data from a `data:` section, by names that ship and `package.module:Name`."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from lockstep.config import DataConfig
from lockstep.data.dataset import Data
from lockstep.data.hugging_face import hugging_face
from lockstep.data.reader import users_line
from lockstep.errors import LockstepError, UsageError, did_you_mean
from lockstep.registry import DATA_SETS


def build_data(data: DataConfig, *, seed: int = 0) -> Data:
    """Return the data that `data.name` and `data.args` describe.

    Args:
        data: the section `data`.
        seed: passed to a user's class with an argument `seed` that `data.args` leaves unset.

    Raises:
        UsageError: an unknown name or argument, or data that can't be used.
    """
    name, args = data.name, dict(data.args)
    if name is None:
        raise UsageError("the config names no data", where="data.name", fix=f"set it: {DATA_SETS.names()}")
    if name.startswith("hf:"):
        return _made(partial(hugging_face, name.removeprefix("hf:")), args, name)
    if ":" in name:
        return _users(name, args, seed)
    return _made(_builder(name), args, name)


def check_data(data: DataConfig) -> None:
    """Check that a config's data are known and take their arguments, without making them.

    Raises:
        UsageError: as `build_data` would.
    """
    if data.name is None or data.name.startswith("hf:"):
        return
    require_accepted(_builder(data.name), data.args, data.name)


def _builder(name: str) -> Callable[..., Any]:
    builder = DATA_SETS.load(name)
    if not callable(builder):
        raise UsageError(
            f"{name} is not a class or function",
            where="data.name",
            fix="name a class or a function, as package.module:Name",
        )
    found: Callable[..., Any] = builder
    return found


def _made(builder: Callable[..., Data], args: Mapping[str, Any], name: str) -> Data:
    made: Data = called(builder, args, name)
    return made


def called(builder: Callable[..., Any], args: Mapping[str, Any], name: str) -> Any:
    """Return `builder(**args)`.

    Raises:
        UsageError: an unknown argument, or a required one is missing.
    """
    require_accepted(builder, args, name)
    return builder(**args)


def require_accepted(builder: Callable[..., Any], args: Mapping[str, Any], name: str) -> None:
    """Reject an unknown argument of `builder`, or the lack of a required one.

    Raises:
        UsageError: with the nearest name.
    """
    accepted = accepted_arguments(builder)
    unknown = [key for key in args if accepted is not None and key not in accepted]
    if unknown and accepted is not None:
        raise UsageError(
            f"{name} takes no argument {unknown[0]!r}{did_you_mean(unknown[0], accepted)}",
            where=f"data.args.{unknown[0]}",
            fix=f"it takes {', '.join(accepted)}",
        )
    missing = [key for key in _required(builder) if key not in args]
    if missing:
        raise UsageError(
            f"{name} needs the argument {missing[0]!r}",
            where=f"data.args.{missing[0]}",
            fix=f"set data.args.{missing[0]}",
        )


def accepted_arguments(builder: Callable[..., Any]) -> list[str] | None:
    """Return the names of the arguments that `builder` takes; None if it takes any, or has no signature."""
    try:
        parameters = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL]


def _required(builder: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(builder).parameters.values()
    except (TypeError, ValueError):
        return []
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


def _users(name: str, args: dict[str, Any], seed: int) -> Data:
    """Return data made by a user's class or function: a dataset, a pair (training, validation), or a `Data`."""
    builder = _builder(name)
    accepted = accepted_arguments(builder)
    if accepted is not None and "seed" in accepted:
        args.setdefault("seed", seed)
    try:
        made = called(builder, args, name)
    except LockstepError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UsageError(f"the data {name} can't be made", where=users_line(error), why=why) from error
    if isinstance(made, Data):
        return made
    if isinstance(made, tuple) and len(made) == 2:
        train, validation = made
    else:
        train, validation = made, None
    for part, role in ((train, "training"), (validation, "validation")):
        if not (part is None and role == "validation") and not _readable(part):
            raise UsageError(
                f"{name} gave {type(part).__name__} for its {role} data, which is not a dataset",
                where="data.name",
                fix="return something with __len__ and __getitem__, an iterable, or a pair (training, validation)",
            )
    return Data(train, validation, facts=dict(getattr(train, "facts", {})))


def _readable(part: Any) -> bool:
    return hasattr(part, "__iter__") or (hasattr(part, "__getitem__") and hasattr(part, "__len__"))
