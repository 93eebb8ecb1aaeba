"""Selects what a user logged besides numbers for the page: the newest texts and images, and histograms as a chart.

The page stays small whatever was logged: of each name the newest few, of a text its beginning, and images as long as
they fit into `IMAGE_BYTES`; the page says how much is left out. Pages are made of runs of strangers too, so a file is
read only if it lies in the run's own folder of images.
"""

import base64
from pathlib import Path
from typing import Any

from lockstep.records import RunDirectory
from lockstep.report.charts import COLOURS, Figure, chart, short
from lockstep.report.read import Row, RunData

NEWEST = 4  # of each name
NAMES = 24  # of each run
TEXT_CHARACTERS = 2_000
IMAGE_BYTES = 450_000  # of all files of a page; in base64 a third more


def samples(runs: list[RunData]) -> list[Row]:
    """Return the texts and images of the page: {name, note, items}, each item {step, text} or {step, image, size}."""
    groups = [
        (run, name, rows)
        for run in runs
        for name, rows in list(run.media.items())[-NAMES:]
        if rows[-1]["kind"] != "histogram"
    ]
    images, left = {}, IMAGE_BYTES
    for place in range(NEWEST):  # the newest of every name, then the ones before them
        for run, name, rows in groups:
            if place < len(rows) and (data := _image(run.path, rows[-1 - place], left)):
                images[run.path, name, place], left = data, left - len(data)
    return [
        _group(run, name, rows, [images.get((run.path, name, place), b"") for place in range(NEWEST)], len(runs) > 1)
        for run, name, rows in groups
    ]


def _group(run: RunData, name: str, rows: list[Row], images: list[bytes], several: bool) -> Row:
    items: list[Row] = []
    for place, row in enumerate(reversed(rows[-NEWEST:])):
        if isinstance(text := row.get("text"), str):
            more = f" … ({len(text):,} characters)" if len(text) > TEXT_CHARACTERS else ""
            items.append({"step": row["step"], "text": text[:TEXT_CHARACTERS] + more})
        elif images[place]:
            source = "data:image/png;base64," + base64.b64encode(images[place]).decode()
            items.append({"step": row["step"], "image": source, "size": row.get("size")})
    left_out = len(rows) - len(items)
    where = "metrics.jsonl" if rows[-1]["kind"] == "text" else RunDirectory(run.path).media.name + "/"
    note = f"{left_out} more in {run.name}/{where}" if left_out else ""
    return {"name": f"{run.name}: {name}" if several else name, "note": note, "items": items}


def _image(run: Path, row: Row, most: int) -> bytes:
    """Return a PNG of the run's folder; empty if there is none, or if it is larger than `most` bytes."""
    if row.get("kind") != "image" or not isinstance(row.get("file"), str):
        return b""
    path = RunDirectory(run).media / Path(row["file"]).name
    try:
        if path.is_symlink() or path.stat().st_size > most:
            return b""
        data = path.read_bytes()
    except OSError:
        return b""
    return data if data.startswith(b"\x89PNG\r\n\x1a\n") else b""


def histograms(run: RunData) -> list[Figure]:
    """Draw the first and the newest histograms of each name."""
    drawn = []
    named = [(name, rows) for name, rows in run.media.items() if rows[-1]["kind"] == "histogram"]
    for number, (name, rows) in enumerate(named[-NAMES:]):
        shown = [row for row in (*rows[:1], *rows[1:][-NEWEST + 1 :]) if _is_whole(row)]
        data = [
            {"type": "scatter", "mode": "lines", "line": {"shape": "hv", "color": colour, "width": 2},
             "name": f"step {row['step']:,}", "x": [short(edge) for edge in row["edges"]],
             "y": [*row["counts"], *row["counts"][-1:]]}
            for row, colour in zip(shown, COLOURS, strict=False)
        ]  # fmt: skip
        drawn.append(
            chart(f"histogram-{number}", name, data, note="Values in each bin, against the value.",
                  yaxis={"rangemode": "tozero", "title": {"text": "values"}})
        )  # fmt: skip
    return drawn


def _is_whole(row: Row) -> bool:
    counts: Any = row.get("counts")
    edges: Any = row.get("edges")
    return isinstance(counts, list) and isinstance(edges, list) and len(edges) == len(counts) + 1
