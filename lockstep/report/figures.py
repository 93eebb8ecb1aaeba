"""Describes figures as plain data, which `draw.js` draws, and keeps them so small that a page stays below 1 MB.

A figure is {id, title, note, wide, x, y, marks, rulers}:

x, y     an axis: `title`; `unit`, written after each number; `percent`; `log`; `zero`: it begins there; `range`;
         `ticks`; or `names`, one for each row of bars, dots or cells
marks    {kind, name, colour, x, y}, of five kinds: `line` (`width`, `dash`, `faint`, `step`: each value holds until the
         next), `area` (stacked), `bar` (stacked; `x` has a length for each row), `dots` (`text`, `symbol`), and `heat`
         (`z` has the values of each row; `log`, `low`, `high`, `unit`). Marks of one name share an entry of the legend;
         `label` is what the pointer shows in place of the name, nothing if empty
rulers   lines across the figure, at `x` or `y`

A colour is the name of a variable of `page.css`, so that it follows the light and the dark theme.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lockstep.report.read import LIMIT, Row, RunData, thinned

Figure = dict[str, Any]
COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6")
GIB, MIB = 2**30, 2**20


def chart(name: str, title: str, marks: list[Row], *, note: str = "", x: Row | None = None, **more: Any) -> Figure:
    """Return a figure; its x axis has steps unless another one is given."""
    return {"id": name, "title": title, "note": note, "marks": marks, "x": {"title": "step"} if x is None else x,
            "y": {}, "wide": False, **more}  # fmt: skip


def line(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, **more: Any) -> Row:
    """Return a line; `shortened` leaves as many of its points as a page can hold."""
    return {"kind": "line", "name": name, "colour": colour, "x": x, "y": y, **more}


def coloured(runs: Sequence[RunData]) -> list[tuple[RunData, str]]:
    """Return each run with a colour."""
    return [(run, COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs)]


def short(value: float | None) -> float | None:
    """Round to six digits, which are enough for a picture."""
    return None if value is None else float(f"{value:.6g}")


def moments(longest: float) -> tuple[float, str, str]:
    """Return the factor, sign and word for times up to `longest` seconds."""
    if longest >= 600:
        return (1 / 3600, " h", "Hours") if longest >= 36_000 else (1 / 60, " min", "Minutes")
    return (1.0, " s", "Seconds") if longest >= 5 else (1e3, " ms", "Milliseconds")


def is_wide_range(values: Iterable[float | None]) -> bool:
    """Return whether positive values differ so much that a logarithmic axis shows them better."""
    known = [value for value in values if value is not None]
    return bool(known) and min(known) > 0 and max(known) > 20 * min(known)


POINTS = 24_000  # of all lines of a page, about 360 kB
CELLS = 6_000  # of a heat map
ROWS = 64
COLUMNS = 240
EVENTS = 200  # of a kind
OWN_CHARTS = 60
LINES_AT_MOST = 24  # runs in a chart


def shortened(figures: list[Figure]) -> int:
    """Thin the lines of figures in place, until they have `POINTS` at most; return how many a line may have, 0: all.

    Lines of wide figures may have twice as many as others. Short lines are left as they are.
    """
    lines = [(mark, 1 + figure["wide"]) for figure in figures for mark in figure["marks"] if mark["kind"] == "line"]
    most = LIMIT // 2
    while most > 4 and sum(min(len(mark["x"]), most * weight) for mark, weight in lines) > POINTS:
        most = most * 9 // 10
    is_thinner = False
    for mark, weight in lines:
        keep = thinned(mark["y"], most * weight)
        is_thinner = is_thinner or len(keep) < len(mark["x"])
        mark["x"], mark["y"] = [short(mark["x"][i]) for i in keep], [short(mark["y"][i]) for i in keep]
    return most if is_thinner else 0


def columns(rows: Sequence[Row], height: int) -> list[Sequence[Row]]:
    """Divide rows into the columns of a heat map that is `height` cells high."""
    count = min(len(rows), COLUMNS, max(1, CELLS // max(1, height)))
    return [rows[i * len(rows) // count : (i + 1) * len(rows) // count] for i in range(count)]


def heat(groups: list[Sequence[Row]], values: Callable[[Row], Sequence[float | None]], **more: Any) -> Row:
    """Return a heat map; a cell has the greatest value of its group of rows."""
    by_column = []
    for group in groups:
        known = [[value for value in cell if value is not None] for cell in zip(*map(values, group), strict=True)]
        by_column.append([short(max(cell)) if cell else None for cell in known])
    cells = [list(row) for row in zip(*by_column, strict=True)]
    return {"kind": "heat", "name": "", "x": [group[0]["step"] for group in groups], "z": cells, **more}


def rows_per_column(groups: list[Sequence[Row]]) -> str:
    """Return what a heat map's note says of its columns."""
    most = max(len(group) for group in groups)
    return f" Each column is the greatest of {most:,} logged steps." if most > 1 else ""
