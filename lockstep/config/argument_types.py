"""Checks that a config's arguments are of the types that a function or a class of ours annotates.

A path that is a number, or a list where a size belongs, would fail somewhere inside.

Tests: tests/data/test_datasets.py, tests/models/test_builders.py
"""

import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.errors import UsageError

_WORDS = {str: "a text", bool: "true or false", int: "a whole number", float: "a number"}
_NUMBERS = {int, float}


def require_types(
    called: Callable[..., Any], args: Mapping[str, Any], where: str, *, numbers: bool = True
) -> None:
    """Raise a UsageError for the first argument that is of another type than is annotated.

    Args:
        called: a function, or a class.
        args: by name.
        where: the key of the arguments, for the message.
        numbers: whether to look at those that are numbers alone, which the callee may do itself.
    """
    annotated: Any = called
    hints = typing.get_type_hints(annotated.__init__ if isinstance(called, type) else annotated)
    for key, value in args.items():
        kinds = [kind for kind in _kinds(hints.get(key, Any)) if kind is not types.NoneType]
        is_optional = len(kinds) < len(_kinds(hints.get(key, Any)))
        known = all(kind in _WORDS or _member(kind) in _WORDS for kind in kinds)
        if not known or (not numbers and _NUMBERS.issuperset(kinds)):
            continue
        if (value is None and is_optional) or any(_fits(value, kind) for kind in kinds):
            continue
        wanted = " or ".join(dict.fromkeys(map(_said, kinds)))
        what = f"{key} should be {wanted}, but is {value!r:.60}"
        fix = f"write {wanted}" + (", or leave it out" if is_optional else "")
        raise UsageError(what, where=f"{where}.{key}", fix=fix)


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the types of a union, or the only one."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def _member(kind: Any) -> Any:
    """Return the type of a sequence's members; None if it is no sequence."""
    is_sequence = typing.get_origin(kind) in (Sequence, list)
    return typing.get_args(kind)[0] if is_sequence else None


def _fits(value: Any, kind: Any) -> bool:
    if _member(kind) is not None:
        is_list = isinstance(value, list | tuple)
        return is_list and all(_fits(each, _member(kind)) for each in value)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    alike = {float: (int, float), str: (str, os.PathLike)}
    return isinstance(value, alike.get(kind, kind))


def _said(kind: Any) -> str:
    """Return what a value of a type is called."""
    member = _member(kind)
    if member is None:
        return _WORDS[kind]
    return f"a list of {_WORDS[member].removeprefix('a ')}s"
