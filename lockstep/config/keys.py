"""The keys of the schema as data, with what each accepts in words.

Error messages for mistakes in a config are made here, too.

Tests: tests/config/test_schema.py, tests/config/test_names.py
"""

import difflib
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from lockstep.config.names import advice_for, advice_for_value
from lockstep.config.schema import Config
from lockstep.config.schema_training import GradientClipConfig, Named, ObjectSpec, Section
from lockstep.config.tree import Node, Path
from lockstep.errors import UsageError
from lockstep.torch_compat.wrap_policy import classes_of

# A block of a template → the section of most of its keys.
_BLOCKS = {"trainer_args": "training", "distributed_env": "distributed"}


@dataclass(frozen=True)
class KeyInfo:
    """One key, with what it accepts in words, its default and its description."""

    key: str
    takes: str
    default: Any
    description: str
    choices: tuple[str, ...] = ()
    is_section: bool = False
    # a mapping with the user's own keys; flat: with text as values
    free: Literal["", "nested", "flat"] = ""

    @property
    def name(self) -> str:
        """The last part of the dotted name."""
        return self.key.rsplit(".", 1)[-1]


@cache
def all_keys() -> dict[str, KeyInfo]:
    """Return all keys by dotted name, sections before their keys, in the order of the schema."""
    return {info.key: info for info in _walk(Config, "")}


def children(section: str) -> list[str]:
    """Return the names of the keys right under a section, or of the sections for `""`."""
    prefix = f"{section}." if section else ""
    return [
        key.removeprefix(prefix)
        for key in all_keys()
        if key.startswith(prefix) and "." not in key.removeprefix(prefix)
    ]


def keys_named(name: str) -> list[str]:
    """Return the dotted keys with this last name, those nearest to the root first.

    Sections are left out.
    """
    keys = [info.key for info in all_keys().values() if info.name == name and not info.is_section]
    return sorted(keys, key=lambda key: key.count("."))


def near_keys(name: str, section: str) -> list[str]:
    """Return the dotted keys that `name` under `section` was probably meant to be, best first.

    There may be none.
    """
    elsewhere = keys_named(name)
    if elsewhere:
        return elsewhere
    in_section = _close(name, children(section), 0.6)
    if in_section:
        return [f"{section}.{in_section[0]}" if section else in_section[0]]
    close = _close(
        name, sorted({info.name for info in all_keys().values() if not info.is_section}), 0.75
    )
    return keys_named(close[0])[:1] if close else []


def _close(word: str, words: list[str], cutoff: float) -> list[str]:
    """Return the known words similar to `word`, best first.

    The beginning of a longer word may be similar, too.
    """
    wanted = word.lower().replace("-", "_")

    def similarity(known: str) -> float:
        return difflib.SequenceMatcher(None, wanted, known).ratio()

    scores = {
        known: max(similarity(known), 0.95 * similarity(known[: len(wanted) + 1]))
        for known in words
    }
    return [
        known
        for known in sorted(words, key=lambda known: -scores[known])
        if scores[known] >= cutoff
    ]


def _walk(model: type[BaseModel], prefix: str) -> Iterator[KeyInfo]:
    """Yield the keys of a section of the schema, and those of the sections within."""
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        section = _section(field.annotation)
        named = _named(field)
        factory: Any = field.default_factory
        default = field.default if factory is None else factory()
        if default is PydanticUndefined or (section is not None and factory is not None):
            default = None
        choices = named.choices if named is not None else _literals(field.annotation)
        description = " ".join((field.description or "").split())
        if named is not None:
            takes = named.takes() if field.annotation is str else f"a list, each {named.takes()}"
        else:
            takes = " or ".join(_words(option, field) for option in _options(field.annotation))
        yield KeyInfo(
            key, takes, default, description, choices, section is not None, _free(field.annotation)
        )
        if section is not None:
            yield from _walk(section, f"{key}.")


def _section(annotation: Any) -> type[Section] | None:
    options = [
        option
        for option in _options(annotation)
        if isinstance(option, type) and issubclass(option, Section)
    ]
    return options[0] if options and options[0] is not ObjectSpec else None


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _literals(annotation: Any) -> tuple[str, ...]:
    for option in _options(annotation):
        if get_origin(option) is Literal:
            return tuple(str(choice) for choice in get_args(option))
        if get_origin(option) is list:
            return _literals(get_args(option)[0])
    return ()


def _free(annotation: Any) -> Literal["", "nested", "flat"]:
    for option in _options(annotation):
        if get_origin(option) is dict:
            return "nested" if get_args(option)[1] is Any else "flat"
    return ""


def _named(field: FieldInfo) -> Named | None:
    inside = get_args(field.annotation)
    marks = [*field.metadata, *(getattr(inside[0], "__metadata__", ()) if inside else ())]
    return next((mark for mark in marks if isinstance(mark, Named)), None)


_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def _words(annotation: Any, field: FieldInfo) -> str:
    """Return in words what a key of this type accepts: "a whole number ≥ 1"."""
    bounds = [
        f"{sign} {'2**63' if getattr(limit, name) == 2**63 else format(getattr(limit, name), 'g')}"
        for limit in field.metadata
        for name, sign in _BOUNDS
        if getattr(limit, name, None) is not None
    ]
    suffix = " " + " and ".join(bounds) if bounds else ""
    of_types: dict[Any, str] = {
        type(None): "null",
        bool: "true or false",
        int: f"a whole number{suffix}",
        float: f"a number{suffix}",
        str: "text",
        ObjectSpec: "package.module:Name, or {name: package.module:Name, args: {…}}",
        GradientClipConfig: "a number (0: off), or {strategy: …, value: …}",
    }
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if origin is list:
        words = _words(get_args(annotation)[0], field)
        plurals = {"text": "texts", "a whole number": "whole numbers"}
        return f"a list of {plurals.get(words, words)}"
    return of_types.get(annotation, "a mapping")


@dataclass(frozen=True)
class Mistake:
    """One mistake in a config: the place, the problem, and what to write instead."""

    where: str
    what: str
    fix: str | None = None


def usage_error(mistakes: Sequence[Mistake], source: str) -> UsageError:
    """Return one error with all mistakes of a config."""
    unique = list(dict.fromkeys(mistakes))
    if len(unique) == 1:
        return UsageError(unique[0].what, where=unique[0].where, fix=unique[0].fix)
    lines = [f"  {m.where}: {m.what}" + (f"; {m.fix}" if m.fix else "") for m in unique]
    return UsageError("\n".join([f"{source} has {len(unique)} mistakes", *lines]))


def from_validation(error: ValidationError, tree: Node) -> list[Mistake]:
    """Return pydantic's errors as mistakes, without its names of classes, unions and URLs."""
    by_path: dict[Path, list[Mistake]] = {}
    for details in error.errors(include_url=False, include_context=False):
        path = _path_in_file(details["loc"], tree)
        if path not in by_path:
            by_path[path] = _mistakes(details, path, tree)
    order = {path: number for number, (path, _) in enumerate(tree.walk())}  # as in the file
    return [
        mistake
        for path in sorted(by_path, key=lambda path: order.get(path, 0))
        for mistake in by_path[path]
    ]


def unknown_key(path: Path, tree: Node) -> list[Mistake]:
    """Return the mistakes for a key that is not in the schema.

    The advice comes from the table of foreign names, or is the nearest key.
    """
    node = tree.find(path)
    if dotted_name(path) in _BLOCKS and isinstance(node.value, dict) and node.value:
        return [
            mistake for name in node.value for mistake in _unknown_in_block((*path, name), tree)
        ]
    mistakes = [Mistake(str(node.origin), f"unknown key {dotted_name(path)}", _suggestion(path))]
    foreign = advice_for(dotted_name(path)) is not None
    if isinstance(node.value, dict) and (foreign or not _meant(path)):
        inside = []
        for below, child in node.walk():
            full = (*path, *below)
            keys = keys_named(str(full[-1]))  # only exact names
            advice = advice_for(dotted_name(full)) or (
                f"write {' or '.join(keys)}" if keys else None
            )
            if below and advice is not None:
                inside.append(
                    Mistake(str(child.origin), f"unknown key {dotted_name(full)}", advice)
                )
        mistakes = inside or mistakes
    return mistakes


def _unknown_in_block(path: Path, tree: Node) -> list[Mistake]:
    """Describe an unknown key in a block of the template language, with the nearest keys."""
    block = str(path[0])
    name = str(path[-1])
    node = tree.find(path)
    if isinstance(node.value, dict):
        return unknown_key(path, tree)
    advice = advice_for(dotted_name(path))
    near = near_keys(name, _BLOCKS[block])
    if advice is None and near:
        advice = f"write {' or '.join(near)} (in the block {block}: {near[0].rpartition('.')[2]})"
    advice = advice or f"the keys of {_BLOCKS[block]} are {', '.join(children(_BLOCKS[block]))}"
    return [Mistake(str(node.origin), f"unknown key {dotted_name(path)}", advice)]


def _suggestion(path: Path) -> str:
    """Return what to write in place of an unknown key."""
    dotted = dotted_name(path)
    advice = advice_for(dotted)
    if advice is not None:
        return advice
    section = dotted_name(path[:-1])
    if section.partition("[")[0] in ("loss_fn", "monitor.callbacks", "checkpoint.storage"):
        return "an object has a name, and args (keywords) and positional (a list) if it takes any"
    name = str(path[-1])
    if len(path) > 1 and name in children(""):
        return (
            f"{name} stands beside {path[0]}, not in it; its keys are {', '.join(children(name))}"
        )
    meant = _meant(path)
    if meant:
        return f"write {' or '.join(meant)}"
    known_section = section if section in all_keys() or not section else ""
    title = f"the keys of {known_section} are" if known_section else "the sections are"
    similar = near_keys(str(path[-1]), section)
    end = f"; a similar name is {similar[0]}" if similar else ""
    return f"{title} {', '.join(children(known_section))}{end}"


def _meant(path: Path) -> list[str]:
    """Return the keys that were probably meant.

    They have this very name, or a similar one in the same section.
    """
    name = str(path[-1])
    section = dotted_name(path[:-1])
    near = near_keys(name, section)
    return [
        key for key in near if key.rpartition(".")[2] == name or key.rpartition(".")[0] == section
    ]


def dotted_name(path: Sequence[str | int]) -> str:
    """Return the path of a value as text.

    `("monitor", "callbacks", 0)` is `monitor.callbacks[0]`.
    """
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else part
    return text


def _path_in_file(loc: Sequence[str | int], tree: Node) -> Path:
    """Return the part of pydantic's location that is in the file, without branches of unions."""
    path: Path = ()
    for part in loc:
        inside = tree.find(path).value
        if not (
            (isinstance(inside, dict) and part in inside)
            or (isinstance(inside, list) and isinstance(part, int))
        ):
            break
        path = (*path, part)
    return path


def _mistakes(details: ErrorDetails, path: Path, tree: Node) -> list[Mistake]:
    """Translate one error of the schema's validation into mistakes with a place and a fix."""
    if details["type"] == "extra_forbidden":
        return unknown_key(path, tree)
    node = tree.find(path)
    if details["type"] == "missing":
        name = dotted_name((*path, str(details["loc"][-1])))
        return [Mistake(str(node.origin), f"{name} is missing")]
    key = dotted_name(path)
    if details["type"] == "value_error":
        return [Mistake(str(node.origin), f"{key}: {details['msg'].removeprefix('Value error, ')}")]
    beginnings = [dotted_name(path[:end]) for end in range(len(path), 0, -1)]
    info = next((all_keys()[name] for name in beginnings if name in all_keys()), None)
    value = node.plain()
    takes = _expected(details, key, info)
    fix = _fix_of_value(key, info, value)
    if fix is None and key in children("") and takes == "a mapping":
        fix = f"its keys are {', '.join(children(key))}: {key}: {{{children(key)[0]}: …}}"
    if details["type"] == "list_type" and not isinstance(value, dict):
        item = fix.removeprefix("write ") if fix is not None else value
        in_python = str(node.origin).startswith("the setting")
        fix = f"write {json.dumps([item])}" if in_python else f"write [{item}]"
    if fix is None and isinstance(value, str) and "number" in takes:
        with suppress(ValueError):
            float(value)
            fix = f"write {value.replace('_', '')} without quotes or underscores"
    return [Mistake(str(node.origin), f"{key} should be {takes}, but is {_show(value)}", fix)]


_TYPES = {
    "string_type": "text",
    "dict_type": "a mapping",
    "list_type": "a list",
    "int_type": "a whole number",
    "string_pattern_mismatch": "package.module:Name",
}


def _expected(details: ErrorDetails, key: str, info: KeyInfo | None) -> str:
    """Return in words what a value should be.

    `info` is of the key, or of the nearest one above it that the schema describes.
    """
    if info is not None and info.key == key:
        return info.takes
    if details["type"] in _TYPES:
        return _TYPES[details["type"]]
    return info.takes if info is not None else details["msg"].lower()


def _fix_of_value(key: str, info: KeyInfo | None, value: Any) -> str | None:
    """Return what to write in place of a value: other tools' names for it, or a similar one."""
    fix = advice_for_value(info.key if info is not None else key, value)
    if key == "distributed.fsdp.auto_wrap_policy":
        fix = _policy_by_name(value) or fix
    if fix is not None:
        return fix
    if key == "distributed.device" and str(value)[-1:].isdecimal():
        # scripts that place ranks write cuda:1
        return "leave it out: each rank takes the device of its local rank"
    if info is None:
        return None
    if info.choices and isinstance(value, str):
        by_lower_case = {choice.lower(): choice for choice in info.choices}
        near = difflib.get_close_matches(value.lower(), list(by_lower_case), n=1, cutoff=0.6)
        if near:
            return f"write {by_lower_case[near[0]]}"
    if value in (None, False) and "none" in info.choices:
        return "write none"
    return None


def _policy_by_name(policy: Any) -> str | None:
    """Return what names one of torch's policies for FSDP units, given as an object.

    None for anything else.
    """
    arguments = getattr(policy, "keywords", {})  # of a functools.partial
    names = classes_of(policy) or sorted(
        kind.__name__ for kind in arguments.get("transformer_layer_cls", ())
    )
    if names:
        return f"write auto_wrap_policy: {json.dumps(names)}"
    if "min_num_params" in arguments:
        return f"write auto_wrap_policy: size, and min_num_params: {arguments['min_num_params']}"
    return None


def _show(value: Any) -> str:
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
