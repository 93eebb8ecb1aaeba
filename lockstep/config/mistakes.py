"""From what is wrong in a config to one message for people: place, key, what is wrong, what to write instead."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lockstep.config.keys import all_keys, children, keys_named, near_keys
from lockstep.config.names import advice_for, advice_for_value
from lockstep.config.tree import Node, Path
from lockstep.errors import UsageError

_BLOCKS = {"trainer_args": "training", "distributed_env": "distributed"}  # of templates → the section most of it is in


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong."""

    where: str
    what: str
    fix: str | None = None


def usage_error(mistakes: Sequence[Mistake], source: str) -> UsageError:
    """All mistakes of one config in one error."""
    unique = list(dict.fromkeys(mistakes))
    if len(unique) == 1:
        return UsageError(unique[0].what, where=unique[0].where, fix=unique[0].fix)
    lines = [f"  {m.where}: {m.what}" + (f"; {m.fix}" if m.fix else "") for m in unique]
    return UsageError("\n".join([f"{source} has {len(unique)} mistakes", *lines]))


def from_validation(error: ValidationError, tree: Node) -> list[Mistake]:
    """What pydantic found, in our words: its own would show classes, unions and URLs."""
    found: dict[Path, list[Mistake]] = {}
    for details in error.errors(include_url=False, include_context=False):
        path = _written(details["loc"], tree)
        if path not in found:
            found[path] = _mistakes(details, path, tree)
    order = {path: number for number, (path, _) in enumerate(tree.walk())}  # as in the file
    return [mistake for path in sorted(found, key=lambda path: order.get(path, 0)) for mistake in found[path]]


def unknown_key(path: Path, tree: Node) -> list[Mistake]:
    """A key that is not in the schema: what to write instead, from the table of foreign names or the nearest one."""
    node = tree.find(path)
    if dotted_name(path) in _BLOCKS and isinstance(node.value, dict) and node.value:
        return [mistake for name in node.value for mistake in _unknown_in_block((*path, name), tree)]
    mistakes = [Mistake(str(node.origin), f"unknown key {dotted_name(path)}", _instead(path))]
    foreign = advice_for(dotted_name(path)) is not None
    if isinstance(node.value, dict) and (foreign or not near_keys(str(path[-1]), dotted_name(path[:-1]))):
        inside = [
            Mistake(str(child.origin), f"unknown key {dotted_name(full)}", advice)
            for below, child in node.walk()
            if below and (advice := _known_advice(full := (*path, *below))) is not None
        ]
        mistakes = inside or mistakes
    return mistakes


def _unknown_in_block(path: Path, tree: Node) -> list[Mistake]:
    """A key that a template's block holds, or that is written as if the block were a section."""
    block, name = str(path[0]), str(path[-1])
    node = tree.find(path)
    if isinstance(node.value, dict):
        return unknown_key(path, tree)
    advice = advice_for(dotted_name(path))
    if advice is None:
        near = near_keys(name, _BLOCKS[block])
        if near:
            advice = f"write {' or '.join(near)} (in the block {block}: {near[0].rpartition('.')[2]})"
        else:
            advice = f"the keys of {_BLOCKS[block]} are {', '.join(children(_BLOCKS[block]))}"
    return [Mistake(str(node.origin), f"unknown key {dotted_name(path)}", advice)]


def _known_advice(path: Path) -> str | None:
    """Advice for a key inside an unknown mapping: only what the table or the schema knows for sure."""
    advice = advice_for(dotted_name(path))
    keys = keys_named(str(path[-1])) if advice is None else []
    return f"write {' or '.join(keys)}" if keys else advice


def _instead(path: Path) -> str:
    dotted = dotted_name(path)
    advice = advice_for(dotted)
    if advice is not None:
        return advice
    section = dotted_name(path[:-1])
    if section.partition("[")[0] in ("loss_fn", "monitor.callbacks", "checkpoint.storage"):
        return "an object has a name, and args (keywords) and positional (a list) if it takes any"
    near = near_keys(str(path[-1]), section)
    if near:
        return f"write {' or '.join(near)}"
    here = section if section in all_keys() or not section else ""
    title = f"the keys of {here} are" if here else "the sections are"
    return f"{title} {', '.join(children(here))}"


def dotted_name(path: Sequence[str | int]) -> str:
    """`("monitor", "callbacks", 0)` is `monitor.callbacks[0]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _written(loc: Sequence[str | int], tree: Node) -> Path:
    """The part of pydantic's location that is in the file: it also names branches of unions."""
    path: Path = ()
    for part in loc:
        here = tree.find(path)
        inside = here.value
        if (isinstance(inside, dict) and part in inside) or (isinstance(inside, list) and isinstance(part, int)):
            path = (*path, part)
        else:
            break
    return path


def _mistakes(details: ErrorDetails, path: Path, tree: Node) -> list[Mistake]:
    if details["type"] == "extra_forbidden":
        return unknown_key(path, tree)
    node = tree.find(path)
    if details["type"] == "missing":
        name = dotted_name((*path, str(details["loc"][-1])))
        return [Mistake(str(node.origin), f"{name} is missing")]
    key = dotted_name(path)
    if details["type"] == "value_error":
        return [Mistake(str(node.origin), f"{key}: {details['msg'].removeprefix('Value error, ')}")]
    facts = all_keys().get(dotted_name(_schema_part(path)))
    takes = _takes(details, facts.takes if facts is not None else None, same=facts is not None and facts.key == key)
    value = node.plain()
    fix = advice_for_value(facts.key if facts is not None else key, value)
    if fix is None and key == "distributed.device" and str(value)[-1:].isdecimal():  # scripts place ranks by hand
        fix = "leave it out: each rank takes the device of its local rank"
    if fix is None and facts is not None and facts.choices and isinstance(value, str):
        fix = _near_choice(value, facts.choices)
    if fix is None and isinstance(value, str) and _reads_as_number(value) and "number" in takes:
        fix = f"write {value.replace('_', '')} without quotes or underscores"
    return [Mistake(str(node.origin), f"{key} should be {takes}, but is {_show(value)}", fix)]


def _takes(details: ErrorDetails, takes: str | None, *, same: bool) -> str:
    if takes is not None and same:
        return takes
    if details["type"] == "string_pattern_mismatch":
        return "package.module:Name"
    words = {"string_type": "text", "dict_type": "a mapping", "list_type": "a list", "int_type": "a whole number"}
    return words.get(details["type"]) or takes or str(details["msg"]).lower()


def _schema_part(path: Path) -> Path:
    """The longest beginning of `path` that is a key of the schema."""
    names = all_keys()
    for end in range(len(path), 0, -1):
        if dotted_name(path[:end]) in names:
            return path[:end]
    return path


def _near_choice(value: str, choices: tuple[str, ...]) -> str | None:
    lowered = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(value.lower(), list(lowered), n=1, cutoff=0.6)
    return f"write {lowered[close[0]]}" if close else None


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
