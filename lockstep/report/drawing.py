"""Parts of every figure: charts with their texts, lines, ticks, units, and long series made short."""

from collections.abc import Sequence
from itertools import product
from math import ceil, floor, log10
from typing import Any

from lockstep.report.read import Row, RunData

Figure = dict[str, Any]
COLOURS = ("@c1", "@c2", "@c3", "@c4", "@c5", "@c6")
GIB = 2**30
LIMIT = 1500  # points of a line


def chart(name: str, title: str, data: list[Any], *, note: str = "", wide: bool = False, **layout: Any) -> Figure:
    """Return a figure."""
    return {"id": name, "title": title, "note": note, "wide": wide, "data": data, "layout": layout}


def line(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, **more: Any) -> Row:
    """Return a line with few enough points to draw."""
    keep = thinned(y)
    style = {"color": colour, "width": more.pop("width", 2), **more.pop("line", {})}
    return {
        "type": "scatter", "mode": "lines", "x": [x[i] for i in keep], "y": [short(y[i]) for i in keep], "name": name,
        "line": style, **more,
    }  # fmt: skip


def cycle(runs: list[RunData]) -> list[str]:
    """Return a colour for each run."""
    return [COLOURS[i % len(COLOURS)] for i in range(len(runs))]


def mode(values: Sequence[Any]) -> str:
    """Return plotly's mode: a single value is drawn as a marker."""
    return "lines" if len(values) > 1 else "markers"


def short(value: float | None) -> float | None:
    """Round to six digits, which are enough for a picture."""
    return None if value is None else float(f"{value:.6g}")


def moments(longest: float) -> tuple[float, str, str]:
    """Return the factor, sign and word for times up to `longest` seconds."""
    return (1.0, " s", "Seconds") if longest >= 5 else (1e3, " ms", "Milliseconds")


def log_axis(values: Sequence[float | None]) -> Row:
    """Return a logarithmic axis with few ticks, each a plain number."""
    ticks = log_ticks(values)
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]} if ticks else {"type": "log"}


def log_ticks(values: Sequence[float | None]) -> list[float]:
    """Return powers of ten around positive `values`; in a small range also their 2 and 5."""
    known = [value for value in values if value is not None and value > 0]
    if not known:
        return []
    low, high = floor(log10(min(known))), ceil(log10(max(known)))
    factors = (1, 2, 5) if max(known) <= 100 * min(known) else (1,)
    every = max(1, (high - low) // 8 + 1)
    ticks = [float(f"{factor * 10.0**power:.6g}") for power, factor in product(range(low, high + 1, every), factors)]
    return [tick for tick in ticks if min(known) / 2.5 <= tick <= max(known) * 2.5]


def thinned(values: Sequence[float | None], limit: int = LIMIT) -> list[int]:
    """Return the indices to keep: the least, the most and the first of each stretch, so that peaks stay."""
    count = len(values)
    if count <= limit:
        return list(range(count))
    stretches = limit // 3
    kept = {0, count - 1}
    for stretch in range(stretches):
        indices = range(stretch * count // stretches, (stretch + 1) * count // stretches)
        kept.add(indices[0])
        numbers = [i for i in indices if values[i] is not None]
        if numbers:
            kept |= {min(numbers, key=lambda i: values[i] or 0.0), max(numbers, key=lambda i: values[i] or 0.0)}
    return sorted(kept)


def smoothed(values: Sequence[float | None], span: float) -> list[float | None]:
    """Return a moving mean over about `span` values on either side, so that it does not lag."""
    forth = _exponential(values, span)
    back = _exponential(values[::-1], span)[::-1]
    return [None if a is None or b is None else (a + b) / 2 for a, b in zip(forth, back, strict=True)]


def _exponential(values: Sequence[float | None], span: float) -> list[float | None]:
    """Return the exponential mean of the earlier values, corrected for its start."""
    keep = 1 - 1 / max(1.0, span)
    mean, weight, result = 0.0, 0.0, list[float | None]()
    for value in values:
        if value is None:
            result.append(None)
            continue
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        result.append(mean / weight)
    return result
