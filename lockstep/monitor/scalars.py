"""A record as plain scalars by name, for sinks that know nothing else: `loss`, `phases/data`, `memory/peak` …

Of a spread over ranks the median keeps the name, and the most is `NAME.most`; of memory the most keeps it.
"""

from collections.abc import Iterator
from typing import Any

_LEFT_OUT = {"step", "time", "skipped", "own_seconds"}


def scalars(row: dict[str, Any]) -> dict[str, float]:
    """Every number of a record."""
    return {
        name: float(value) for key, inside in row.items() if key not in _LEFT_OUT for name, value in _of(key, inside)
    }


def _of(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, (int, float)):
        yield name, value
    elif isinstance(value, dict):
        for key, inside in value.items():
            yield from _of(f"{name}/{key}", inside)
    elif isinstance(value, list) and len(value) == 4:
        _, middle, most, _ = value
        if name.startswith("memory/"):
            yield name, most
        else:
            yield name, middle
            yield f"{name}.most", most
