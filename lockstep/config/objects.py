"""Build the objects that a config names, `package.module:Name` with arguments."""

from collections.abc import Callable
from typing import Any

from lockstep.config.schema_training import ObjectSpec
from lockstep.errors import UsageError
from lockstep.registry import load_object, require_arguments


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
        fix = "name a class or a function, as package.module:Name"
        raise UsageError(f"{spec.name} can't be called", where=where, fix=fix)
    for value in (*spec.positional, *spec.args.values()):
        _each_spec(value, lambda inner: check_object(inner, where))
    require_arguments(target, spec.args | further, spec.name, f"{where}.args", *spec.positional)
    return target


def _each_spec(value: Any, work: Callable[[ObjectSpec], Any]) -> Any:
    """Return `value` with every `{name: package.module:Name, …}` in it replaced by the result of `work`."""
    if isinstance(value, dict):
        if set(value) <= {"name", "args", "positional"} and ":" in str(value.get("name", "")):
            return work(ObjectSpec.model_validate(value))
        return {key: _each_spec(inside, work) for key, inside in value.items()}
    if isinstance(value, list):
        return [_each_spec(inside, work) for inside in value]
    return value
