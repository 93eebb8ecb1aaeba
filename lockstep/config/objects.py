"""Objects named in a config, `package.module:Name` with arguments."""

import difflib
import importlib
import inspect
from typing import Any

from lockstep.config.schema_training import ObjectSpec
from lockstep.errors import UsageError


def load_object(name: str, where: str) -> Any:
    """What `package.module:Name` names; `where` is the config key, for the message.

    Raises:
        UsageError: no such module, the module does not import, or it has no such name.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{name!r} does not name an object", where=where, fix="write package.module:Name")
    try:
        here: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"there is no module {error.name or module_name!r}, needed by {name}",
            where=where,
            fix="set PYTHONPATH to the folder that holds it, or install it",
        ) from None
    except Exception as error:  # the user's own module, which may raise anything
        raise UsageError(
            f"the module {module_name} does not import", where=where, why=f"{type(error).__name__}: {error}"
        ) from error
    for part in attribute.split("."):
        if not hasattr(here, part):
            near = difflib.get_close_matches(part, [n for n in dir(here) if not n.startswith("_")], n=1)
            raise UsageError(f"{module_name} has no {attribute}", where=where, fix=f"write {near[0]}" if near else None)
        here = getattr(here, part)
    return here


def build_object(spec: ObjectSpec, where: str, **further: Any) -> Any:
    """Call what `spec` names. Arguments that are `{name: package.module:Name, …}` themselves are built first;
    `further` are keywords of the caller's, over those of the spec.

    Raises:
        UsageError: it can't be imported, or does not take these arguments.
    """
    target = load_object(spec.name, where)
    positional = [_built(value, where) for value in spec.positional]
    keywords = {key: _built(value, where) for key, value in spec.args.items()} | further
    if not callable(target):
        raise UsageError(
            f"{spec.name} can't be called", where=where, fix="name a class or a function, as package.module:Name"
        )
    try:
        inspect.signature(target).bind(*positional, **keywords)
    except TypeError as error:
        raise UsageError(f"{spec.name} does not take these arguments", where=where, why=str(error)) from None
    except ValueError:
        pass  # a builtin without a signature: it checks for itself
    return target(*positional, **keywords)


def _built(value: Any, where: str) -> Any:
    if isinstance(value, dict):
        if set(value) <= {"name", "args", "positional"} and ":" in str(value.get("name", "")):
            return build_object(ObjectSpec.model_validate(value), where)
        return {key: _built(inside, where) for key, inside in value.items()}
    if isinstance(value, list):
        return [_built(inside, where) for inside in value]
    return value
