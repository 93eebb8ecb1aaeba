"""Runs `lockstep report RUN`.

Of a folder of runs, compares them on one page, with a link to the report of each.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

from lockstep.errors import RunError, UsageError
from lockstep.files.object_client import ObjectClient
from lockstep.files.paths import bucket_url
from lockstep.machine.scratch import temporary
from lockstep.report import units
from lockstep.report.advice import advise
from lockstep.report.charts import LINES_AT_MOST, loss_against, shortened
from lockstep.report.page import (
    Page,
    best_first,
    compared,
    differences,
    not_read,
    page_data,
    render,
    serve,
    write,
)
from lockstep.report.read import RunData, is_run, read_run, typical_step, wall_seconds
from lockstep.run_directory.records import RunDirectory
from lockstep.run_directory.run_files import printable
from lockstep.run_directory.run_mirror import RunMirror

INDEX = "index.html"
_DEEPEST = 3  # levels of folders below the one that is named


def run(given: Sequence[str], *, output: Path | None, live: bool, port: int) -> int:
    """Serve the page of runs, or write it, to `RUN/report.html` of the first or `output`.

    Of a folder, its index. Runs in buckets are fetched for the length of the call.
    """
    if live:
        serve([Path(path) for path in given], port)
        return 0
    with ExitStack() as fetched:
        paths = []
        publish: Callable[[Path], str] = str
        for path in given:
            url = bucket_url(path, "RUN")
            if url is None:
                paths.append(Path(path))
                continue
            folder = fetched.enter_context(temporary("report")) / url.rpartition("/")[2]
            mirror = RunMirror(ObjectClient(url), folder)
            fetch_run(mirror)
            if not paths and output is None:
                publish = mirror.publish
            paths.append(folder)
        target = _write(paths, output)
        print(printable(f"lockstep: {publish(target)}"))
    return 0


def _write(paths: Sequence[Path], output: Path | None) -> Path:
    """Write the page of runs, or the index of a folder, and print what stands in it."""
    if len(paths) == 1 and paths[0].is_dir() and not is_run(paths[0]):
        target = write_index(paths[0], output)
    else:
        each = {path.resolve(): path for path in paths}.values()  # once
        runs = [read_run(path, among=len(each)) for path in each]
        target = output or paths[0] / "report.html"
        write(render(page_data(runs)), target)
        for run in runs:
            step = run.rows[-1]["step"] if run.rows else 0
            loss = run.last("loss")
            seconds = typical_step(run)
            about = [f"{run.name}: {run.status}, {step} steps"]
            about += [f"loss {loss:.4f}"] if loss is not None else []
            about += [f"{units.seconds(seconds)} per step"] if seconds else []
            lines = [", ".join(about), *(f"  {advice.found} {advice.do}" for advice in advise(run))]
            print(
                printable("\n".join([*lines, *(f"  left out: {text}" for text in not_read([run]))]))
            )
    return target


def fetch_run(mirror: RunMirror) -> None:
    """Fetch the records of a run in a bucket. Raises UsageError: there is none."""
    try:
        fetched = mirror.fetch()
    except OSError as error:
        raise RunError(f"{mirror} can't be read", why=str(error)) from None
    if not fetched:
        fix = "give the URL that `lockstep train --output-dir` has had"
        raise UsageError(f"there is no run in {mirror}", fix=fix)


def runs_in(folder: Path, depth: int = _DEEPEST) -> list[Path]:
    """Return the run directories in a folder, and in folders in it, by name."""
    runs: list[Path] = []
    for path in _entries(folder):
        if not path.is_dir() or path.name.startswith("."):
            continue
        if is_run(path):
            runs.append(path)
        elif depth > 1:
            runs += runs_in(path, depth - 1)
    return runs


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # a file, or a folder that may not be read
        return []


def write_index(folder: Path, output: Path | None) -> Path:
    """Write the page, and the report of each run that has none or an older one; return its path."""
    paths = runs_in(folder)
    if not paths:
        fix = (
            "give the folder that `lockstep train --output-dir` wrote, as runs/NAME, or a folder of"
            " such folders"
        )
        raise UsageError(f"{folder} is not a run directory, and there is none in it", fix=fix)
    target = output or folder / INDEX
    runs = best_first([read_run(path, among=len(paths)) for path in paths])
    for run in runs:
        run.name = run.path.relative_to(folder).as_posix()
        report = run.path / "report.html"
        files = RunDirectory(run.path)
        changed = [file.stat().st_mtime for file in (files.metrics, files.events) if file.exists()]
        if not report.exists() or any(moment > report.stat().st_mtime for moment in changed):
            try:
                write(render(page_data([read_run(run.path)])), report)
            except UsageError as error:  # one folder does not stop the page of all
                print(printable(f"lockstep: {error.what}; {error.why or error.fix}"))
    write(render(index_data(folder, runs, target.parent)), target)
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
        "made": units.moment(
            max((event["time"] for run in runs for event in run.events), default=0.0)
        ),
        "not_read": not_read(runs),
        "runs": [],
        "advice": None,
        "charts": figures,
        "tables": [table, *([where] if where else [])],
        "configs": [],
        "plain": True,
    }
