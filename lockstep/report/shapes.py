"""Keeps the parts of a run's records that have their expected shape.

In a stranger's run directory they may hold anything.

A shape is `float` (finite), `int`, `str` or `bool`; `[shape]`, a list; `(shape, …)`, a list of that
length; `{str: shape}`, a mapping; or `{"name": shape, …}`, a record. Of mappings and records the
entries that fit are kept.

Tests: tests/report/test_hostile.py
"""

from typing import Any

Shape = Any
_LARGEST = 1e100  # sums and products of such are finite, too
_LARGEST_INT = 2**53
_MOST = 10_000  # entries of a list or mapping
_CHARACTERS = 10_000  # of a text
_NOTHING = object()

_SPREAD = (float, float, float, float)  # minimum, median, maximum, rank of the maximum
TIME = "time"  # a key whose number is a date
_LATEST = 250_000_000_000.0  # seconds since 1970: the year 9892

STEP = {
    "recomputed": str,
    "skipped": bool,
    "phases": {str: _SPREAD},
    "memory": {str: _SPREAD},
    "own_seconds": [float],
    "gpu_utilisation": _SPREAD,
    "gradient_norms": {str: float},
}
EVENT = {
    "sizes": {str: int},
    "versions": {str: str},
    "lines": [str],
    "total_steps": int,
    "parameters": int,
    "layout": str,
    "peak_source": str,
    "rank": int,
    "data_workers": int,
    "given": {str: str},
    "ranks": [
        {"rank": int, "host": str, "device": str, "process": int, "threads": int, "cores": int}
    ],
}
PROFILE = {
    "about": str,
    "verdict": str,
    "memory": [(float, float)],
    "ranks": [{"rank": int, "seconds": float, "shares": {str: float}}],
    "operators": [{"name": str, "seconds": float, "share": float, "calls": float}],
}
MEDIA = {
    "kind": str,
    "text": str,
    "file": str,
    "size": (int, int),
    "counts": [float],
    "edges": [float],
}


def fitting(value: Any, shape: Shape, default: Any = None) -> Any:
    """Return what of a value has the shape; `default` if it has another one."""
    fitted = _fit(value, shape)
    return default if fitted is _NOTHING else fitted


def fitting_row(row: dict[str, Any], known: dict[str, Shape]) -> dict[str, Any]:
    """Return a row whose entries fit: those that are known by name; of others, numbers.

    Other scalars become None.
    """
    kept: dict[str, Any] = {}
    for name, value in list(row.items())[:_MOST]:
        if name in known:
            fitted = _fit(value, known[name])
            if fitted is not _NOTHING:
                kept[name] = fitted
        elif isinstance(value, dict | list):
            continue
        else:
            kept[name] = number(value)
    return kept


def number(value: Any) -> Any:
    """Return a finite number of reasonable size.

    None for everything else, such as the text "nan".
    """
    kind = type(value)  # JSON has no subclasses of these
    return value if (kind is float or kind is int) and -_LARGEST < value < _LARGEST else None


def moment_of(row: dict[str, Any]) -> float | None:
    """Return the time of a row, in seconds since 1970.

    None if it has none, or one that no calendar has.
    """
    value = number(row.get(TIME))
    return None if value is None or not 0 <= value < _LATEST else float(value)


def step_of(row: dict[str, Any]) -> int | None:
    """Return the step of a row; None if it has none."""
    value = row.get("step")
    return value if type(value) is int and 0 <= value < _LARGEST_INT else None


def _fit(value: Any, shape: Shape) -> Any:
    """Return what of a value has the shape, or `_NOTHING`."""
    if shape is float:
        as_number = number(value)
        return _NOTHING if as_number is None else as_number
    if shape is str:
        return value[:_CHARACTERS] if isinstance(value, str) else _NOTHING
    if shape is int:
        return value if type(value) is int and abs(value) < _LARGEST_INT else _NOTHING
    if shape is bool:
        return value if isinstance(value, bool) else _NOTHING
    if isinstance(shape, dict):
        return _fit_mapping(value, shape)
    if not isinstance(value, list) or len(value) > _MOST:
        return _NOTHING
    if isinstance(shape, tuple) and len(value) != len(shape):
        return _NOTHING
    shapes = shape if isinstance(shape, tuple) else shape * len(value)
    fitted = [_fit(element, its) for element, its in zip(value, shapes, strict=True)]
    return _NOTHING if any(element is _NOTHING for element in fitted) else fitted


def _fit_mapping(value: Any, shape: dict[Any, Shape]) -> Any:
    if not isinstance(value, dict) or len(value) > _MOST:
        return _NOTHING
    named = shape.get(str)
    pairs = (
        (name, _fit(entry, named or shape.get(name)))
        for name, entry in value.items()
        if named or name in shape
    )
    return {name: entry for name, entry in pairs if entry is not _NOTHING}
