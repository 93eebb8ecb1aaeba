"""Selects what a user logged besides numbers for the page: the newest texts and images, and histograms as a chart.

The page stays small whatever was logged: of each name the newest few, of a text its beginning, and of all that what
fits into the page; it says how much is left out. Pages are made of runs of strangers too, so a file is read only if it
lies in the run's own folder of images.
"""

import base64
import json
from pathlib import Path
from typing import Any

from lockstep.records import RunDirectory
from lockstep.report.figures import COLOURS, Figure, chart, line
from lockstep.report.read import Row, RunData

NEWEST = 4  # of each name
NAMES = 24  # of texts and images, and of histograms
TEXT_CHARACTERS = 2_000


def samples(runs: list[RunData], left: int) -> list[Row]:
    """Return the texts and images of the page, at most `left` bytes of JSON.

    Returns:
        {name, note, items} of each name; an item is {step, text} or {step, image, size}.
    """
    groups: list[tuple[RunData, str, list[Row], list[Row]]] = []
    names_left_out = 0
    for run in runs:
        named: list[Any] = [
            (run, name, rows, []) for name, rows in run.media.items() if rows[-1]["kind"] != "histogram"
        ]
        groups += (kept := named[-max(1, NAMES // len(runs)) :])
        names_left_out += len(named) - len(kept)
    for place in range(NEWEST):  # the newest of every name, then the ones before them
        for run, _, rows, items in groups:
            item = _item(run.path, rows[-1 - place], left) if place < len(rows) else {}
            if item and (size := len(json.dumps(item))) <= left:
                items.append(item)
                left -= size
    shown: list[Row] = [
        {"name": f"{run.name}: {name}" if len(runs) > 1 else name, "note": _left_out(run, rows, items), "items": items}
        for run, name, rows, items in groups
    ]
    if names_left_out:
        shown[0]["note"] += f" {names_left_out} more names are in metrics.jsonl."
    return shown


def _left_out(run: RunData, rows: list[Row], items: list[Row]) -> str:
    where = "metrics.jsonl" if rows[-1]["kind"] == "text" else RunDirectory(run.path).media.name + "/"
    return f"{len(rows) - len(items)} more in {run.name}/{where}" if len(rows) > len(items) else ""


def _item(run: Path, row: Row, most: int) -> Row:
    """Return what the page shows of a text or an image; empty if there is none, or if it is larger than `most`."""
    if isinstance(text := row.get("text"), str):
        more = f" … ({len(text):,} characters)" if len(text) > TEXT_CHARACTERS else ""
        return {"step": row["step"], "text": text[:TEXT_CHARACTERS] + more}
    image = base64.b64encode(_image(run, row, most)).decode()
    source = f"data:image/png;base64,{image}"
    return {"step": row["step"], "image": source, "size": row.get("size")} if image else {}


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
        marks = [
            line(row["edges"], [*row["counts"], *row["counts"][-1:]], f"step {row['step']:,}", colour, step=True)
            for row, colour in zip(shown, COLOURS, strict=False)
        ]
        note = "Values in each bin, against the value."
        drawn.append(chart(f"histogram-{number}", name, marks, note=note, x={}, y={"zero": True}))
    return drawn


def _is_whole(row: Row) -> bool:
    counts: Any = row.get("counts")
    edges: Any = row.get("edges")
    return isinstance(counts, list) and isinstance(edges, list) and len(edges) == len(counts) + 1
