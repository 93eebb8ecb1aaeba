"""Compares the runs of a folder on one page, with a link to the report of each: `lockstep report RUNS`."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from lockstep.errors import UsageError
from lockstep.records import RunDirectory
from lockstep.report import page, units
from lockstep.report.charts import loss_against
from lockstep.report.figures import LINES_AT_MOST, shortened
from lockstep.report.page import Page, compared, differences, render, write, write_text
from lockstep.report.read import RunData, is_run, read_run, wall_seconds

INDEX = "index.html"
_DEEPEST = 3  # levels of folders below the one that is named


def run(paths: Sequence[Path], *, output: Path | None, live: bool, port: int) -> int:
    """Report on runs, as `page.run` does, or write the index of one folder of runs."""
    if live or len(paths) > 1 or not paths[0].is_dir() or is_run(paths[0]):
        return page.run(paths, output=output, live=live, port=port)
    print(f"lockstep: {write_index(paths[0], output)}")
    return 0


def runs_in(folder: Path, depth: int = _DEEPEST) -> list[Path]:
    """Return the run directories in a folder, and in folders in it, by name."""
    found: list[Path] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not path.is_dir() or path.name.startswith("."):
            continue
        if is_run(path):
            found.append(path)
        elif depth > 1:
            found += runs_in(path, depth - 1)
    return found


def write_index(folder: Path, output: Path | None) -> Path:
    """Write the page, and the report of each run that has none or an older one; return its path.

    Raises:
        UsageError: the folder holds no run.
    """
    paths = runs_in(folder)
    if not paths:
        raise UsageError(
            f"{folder} is not a run directory, and there is none in it",
            fix="give the folder that `lockstep train --output-dir` wrote, as runs/NAME, or a folder of such folders",
        )
    target = output or folder / INDEX
    runs = [read_run(path) for path in paths]
    for run in runs:
        run.name = run.path.relative_to(folder).as_posix()
        if _is_stale(run.path):
            write([read_run(run.path)], run.path / "report.html")
    write_text(render(index_data(folder, runs, target.parent)), target)
    return target


def index_data(folder: Path, runs: list[RunData], beside: Path) -> Page:
    """Return the page's content; links are relative to `beside`."""
    table = compared(runs)
    left_out = len(runs) - LINES_AT_MOST
    for row, run in zip(table["rows"], runs, strict=True):
        address = "./" + quote(Path(os.path.relpath(run.path / "report.html", beside)).as_posix())
        row[0] = {"text": run.name, "href": address}
        row.insert(4, units.seconds(wall_seconds(run)))
    table["head"].insert(4, "wall time")
    where = differences(runs)
    figures = loss_against(runs, note=f"The first {LINES_AT_MOST} runs." if left_out > 0 else "")
    shortened(figures)
    return {
        "title": f"{len(runs)} run{'s' if len(runs) > 1 else ''} in {folder.resolve().name}",
        "made": units.moment(max((event["time"] for run in runs for event in run.events), default=0.0)),
        "runs": [],
        "advice": None,
        "charts": figures,
        "tables": [table, *([where] if where else [])],
        "configs": [],
        "plain": True,
    }


def _is_stale(path: Path) -> bool:
    report, run = path / "report.html", RunDirectory(path)
    if not report.exists():
        return True
    return any(file.exists() and file.stat().st_mtime > report.stat().st_mtime for file in (run.metrics, run.events))
