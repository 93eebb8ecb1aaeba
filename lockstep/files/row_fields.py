"""Finds the fields of a row: by name, within structures, and messages that are kept as JSON.

A row `{"id": 3, "data": {"text": "…"}}` has the field `data.text`. Tables without lists keep
messages as JSON in a text.

Does not import torch.

Tests: tests/files/test_row_fields.py
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

_ABSENT = object()


def has_field(row: Mapping[str, Any], name: str) -> bool:
    """Return whether a row has a field; `a.b` is the field b of a structure in a."""
    return field_of_row(row, name, _ABSENT) is not _ABSENT


def field_of_row(row: Mapping[str, Any], name: str, default: Any = None) -> Any:
    """Return the value of a field; of none, `default`. A name with dots may be one of its own."""
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    inside = row.get(outer)
    return field_of_row(inside, inner, default) if isinstance(inside, Mapping) else default


def names_of_fields(row: Mapping[str, Any]) -> list[str]:
    """Return the names of all fields, in structures, too."""
    return list(_names(row, ""))


def _names(row: Mapping[str, Any], before: str) -> Iterator[str]:
    for key, value in row.items():
        if isinstance(value, Mapping) and value:
            yield from _names(value, f"{before}{key}.")
        else:
            yield f"{before}{key}"


def with_messages_read(value: Any) -> Any:
    """Return the messages that a text holds as JSON; any other value as it is."""
    read = _json_list(value)
    return read if read and is_conversation(read) else value


def tools_of_row(value: Any) -> Any:
    """Return the list of tools that a text holds as JSON; any other value as it is."""
    read = _json_list(value)
    return value if read is None else read


def _json_list(value: Any) -> list[Any] | None:
    """Return the list that a text holds as JSON; None if it holds none."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return None
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return read if isinstance(read, list) else None


def is_conversation(value: Any) -> bool:
    """Return whether a field holds a list of messages, each with a role."""
    return isinstance(value, list) and all(
        isinstance(one, Mapping) and ("role" in one or {"from", "value"} <= one.keys())
        for one in value
    )
