"""What every figure of the report is made of: a chart with its words, lines, ticks, units."""

from collections.abc import Sequence
from itertools import product
from math import ceil, floor, log10
from typing import Any

from lockstep.report.read import Row, Run
from lockstep.report.thin import thinned

Figure = dict[str, Any]
COLOURS = ("@c1", "@c2", "@c3", "@c4", "@c5", "@c6")
GIB = 2**30


def chart(name: str, title: str, data: list[Any], *, note: str = "", wide: bool = False, **layout: Any) -> Figure:
    """One figure with its words."""
    return {"id": name, "title": title, "note": note, "wide": wide, "data": data, "layout": layout}


def line(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, **more: Any) -> Row:
    keep = thinned(y)
    style = {"color": colour, "width": more.pop("width", 2), **more.pop("line", {})}
    return {
        "type": "scatter", "mode": "lines", "x": [x[i] for i in keep], "y": [short(y[i]) for i in keep], "name": name,
        "line": style, **more,
    }  # fmt: skip


def cycle(runs: list[Run]) -> list[str]:
    """A colour for each run."""
    return [COLOURS[i % len(COLOURS)] for i in range(len(runs))]


def mode(values: Sequence[Any]) -> str:
    return "lines" if len(values) > 1 else "markers"


def short(value: float | None) -> float | None:
    """Six digits are enough for a picture."""
    return None if value is None else float(f"{value:.6g}")


def moments(longest: float) -> tuple[float, str, str]:
    """How to write times up to `longest` seconds: the factor, the sign, and the word."""
    return (1.0, " s", "Seconds") if longest >= 5 else (1e3, " ms", "Milliseconds")


def log_axis(values: Sequence[float | None]) -> Row:
    """A logarithmic axis with few ticks, each a plain number."""
    ticks = log_ticks(values)
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]} if ticks else {"type": "log"}


def log_ticks(values: Sequence[float | None]) -> list[float]:
    """Powers of ten around positive `values`; with their 2 and 5 where there are few."""
    known = [value for value in values if value is not None and value > 0]
    if not known:
        return []
    low, high = floor(log10(min(known))), ceil(log10(max(known)))
    factors = (1, 2, 5) if max(known) <= 100 * min(known) else (1,)
    every = max(1, (high - low) // 8 + 1)
    ticks = [float(f"{factor * 10.0**power:.6g}") for power, factor in product(range(low, high + 1, every), factors)]
    return [tick for tick in ticks if min(known) / 2.5 <= tick <= max(known) * 2.5]
