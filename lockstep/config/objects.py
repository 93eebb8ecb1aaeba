"""Build the objects that a config names, `package.module:Name` with arguments."""

import inspect
from collections.abc import Callable
from typing import Any

from lockstep.config.schema_training import ObjectSpec
from lockstep.errors import UsageError, did_you_mean
from lockstep.registry import load_object


def build_object(spec: ObjectSpec, where: str, **further: Any) -> Any:
    """Import the class or function of a spec, and return the result of a call with its arguments.

    Arguments that are `{name: package.module:Name, …}` themselves are built first; `further` replaces the spec's.
    `where` is the config key, for messages.

    Raises UsageError: it can't be imported, or does not take these arguments.
    """
    target = check_object(spec, where, **further)
    positional = [_each_spec(value, lambda inner: build_object(inner, where)) for value in spec.positional]
    keywords = {key: _each_spec(value, lambda inner: build_object(inner, where)) for key, value in spec.args.items()}
    return target(*positional, **keywords | further)


def check_object(spec: ObjectSpec, where: str, **further: Any) -> Any:
    """Return the class or function of a spec, which is not called, if it takes the arguments.

    Raises UsageError: as from `build_object`.
    """
    target = load_object(spec.name, where)
    if not callable(target):
        raise UsageError(
            f"{spec.name} can't be called", where=where, fix="name a class or a function, as package.module:Name"
        )
    for value in (*spec.positional, *spec.args.values()):
        _each_spec(value, lambda inner: check_object(inner, where))
    try:
        signature = inspect.signature(target)
    except ValueError:
        return target  # a builtin without a signature, which checks its arguments when it is called
    accepted = keywords_of(signature)
    unknown = [key for key in spec.args if accepted is not None and key not in accepted]
    if unknown and accepted is not None:
        raise UsageError(
            f"{spec.name} takes no argument {unknown[0]!r}{did_you_mean(unknown[0], accepted)}",
            where=f"{where}.args.{unknown[0]}",
            fix=f"it takes {', '.join(accepted)}" if accepted else "leave args out: it takes none",
        )
    try:
        signature.bind(*spec.positional, **spec.args | further)
    except TypeError as error:
        raise UsageError(f"{spec.name} does not take these arguments", where=where, why=str(error)) from None
    return target


def keywords_of(signature: inspect.Signature) -> list[str] | None:
    """Return the names of keyword arguments; None if any name is accepted."""
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_name]


def _each_spec(value: Any, work: Callable[[ObjectSpec], Any]) -> Any:
    """Return `value` with every `{name: package.module:Name, …}` in it replaced by the result of `work`."""
    if isinstance(value, dict):
        if set(value) <= {"name", "args", "positional"} and ":" in str(value.get("name", "")):
            return work(ObjectSpec.model_validate(value))
        return {key: _each_spec(inside, work) for key, inside in value.items()}
    if isinstance(value, list):
        return [_each_spec(inside, work) for inside in value]
    return value
