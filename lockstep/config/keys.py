"""The keys of the schema, as data: what each takes, in words; which key a wrong one was probably meant to be.

Read by the error messages, the flags, the table of foreign names and the reference page.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from lockstep.config.named import Named
from lockstep.config.schema import Config
from lockstep.config.schema_training import GradientClipConfig, ObjectSpec, Section


@dataclass(frozen=True)
class KeyFacts:
    """One key: its dotted name, what it takes in words, its default, and what it means."""

    key: str
    takes: str
    default: Any
    description: str
    choices: tuple[str, ...] = ()
    is_section: bool = False
    free: Literal["", "nested", "flat"] = ""  # a mapping with keys of the user's own; flat: of text only

    @property
    def name(self) -> str:
        return self.key.rsplit(".", 1)[-1]


@cache
def all_keys() -> dict[str, KeyFacts]:
    """Every key by its dotted name, sections before their keys, in the order of the schema."""
    return {facts.key: facts for facts in _walk(Config, "")}


def children(section: str) -> list[str]:
    """The names of the keys right under a section (`""`: the sections)."""
    prefix = f"{section}." if section else ""
    return [
        key.removeprefix(prefix) for key in all_keys() if key.startswith(prefix) and "." not in key.removeprefix(prefix)
    ]


def keys_named(name: str) -> list[str]:
    """The dotted keys whose last name is `name`, values only, shallowest first."""
    found = [facts.key for facts in all_keys().values() if facts.name == name and not facts.is_section]
    return sorted(found, key=lambda key: key.count("."))


def near_keys(name: str, section: str) -> list[str]:
    """What `name`, written under `section`, was probably meant to be: dotted keys, best first; may be empty."""
    elsewhere = keys_named(name)
    if elsewhere:
        return elsewhere
    here = _close(name, children(section), 0.6)
    if here:
        return [f"{section}.{found}" if section else found for found in here[:1]]
    names = {facts.name for facts in all_keys().values() if not facts.is_section}
    close = _close(name, sorted(names), 0.75)
    return keys_named(close[0])[:1] if close else []


def _close(word: str, words: list[str], cutoff: float) -> list[str]:
    """The known words like `word`, best first; a word that is like the beginning of a longer one counts too."""
    wanted = word.lower().replace("-", "_")
    scored = [
        (max(_likeness(wanted, known), 0.95 * _likeness(wanted, known[: len(wanted) + 1])), known) for known in words
    ]
    return [known for score, known in sorted(scored, key=lambda pair: -pair[0]) if score >= cutoff]


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _walk(model: type[BaseModel], prefix: str) -> Iterator[KeyFacts]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        section = _section(field.annotation)
        yield KeyFacts(
            key=key,
            takes=_takes(field),
            default=_default(field, section),
            description=field.description or "",
            choices=_choices(field),
            is_section=section is not None,
            free=_free(field.annotation),
        )
        if section is not None:
            yield from _walk(section, f"{key}.")


def _section(annotation: Any) -> type[Section] | None:
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, Section) and option is not ObjectSpec:
            return option
    return None


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _choices(field: FieldInfo) -> tuple[str, ...]:
    named = _named(field)
    return named.choices if named is not None else _literals(field.annotation)


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


def _default(field: FieldInfo, section: type[Section] | None) -> Any:
    if section is not None and field.default_factory is not None:
        return None
    value = field.get_default(call_default_factory=True)
    return None if value is PydanticUndefined else value


def _named(field: FieldInfo) -> Named | None:
    inside = get_args(field.annotation)
    marks = [*field.metadata, *(getattr(inside[0], "__metadata__", ()) if inside else ())]
    return next((mark for mark in marks if isinstance(mark, Named)), None)


def _takes(field: FieldInfo) -> str:
    if (named := _named(field)) is not None:
        return named.takes() if field.annotation is str else f"a list, each {named.takes()}"
    words = [_words(option, field) for option in _options(field.annotation)]
    return " or ".join(words)


_BOUNDS = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))


def _words(annotation: Any, field: FieldInfo) -> str:
    bounds = [
        f"{sign} {'2**63' if getattr(limit, name) == 2**63 else format(getattr(limit, name), 'g')}"
        for limit in field.metadata
        for name, sign in _BOUNDS
        if getattr(limit, name, None) is not None
    ]
    suffix = " " + " and ".join(bounds) if bounds else ""
    if annotation is type(None):
        return "null"
    if annotation is bool:
        return "true or false"
    if annotation is int:
        return "a whole number" + suffix
    if annotation is float:
        return "a number" + suffix
    if annotation is str:
        return "text"
    origin = get_origin(annotation)
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(annotation))
    if origin is list:
        return f"a list of {_plural(_words(get_args(annotation)[0], field))}"
    if annotation is ObjectSpec:
        return "package.module:Name, or {name: package.module:Name, args: {…}}"
    if annotation is GradientClipConfig:
        return "a number (0: off), or {strategy: …, value: …}"
    return "a mapping"


def _plural(words: str) -> str:
    return {"text": "texts", "a whole number": "whole numbers"}.get(words, words)
