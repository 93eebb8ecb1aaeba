"""Builds the page, one HTML file that contains its data, style and scripts.

Of a running run, serves it on loopback.

Its content security policy forbids every request; served live, it allows those to its own server,
which the page asks for its data every two seconds. Names and configs of runs go into the page as
data and are shown as text, never as markup. Pages are made of runs of strangers too, so an image is
read only if it lies in the run's own folder of images.

Tests: tests/report/test_report.py, tests/report/test_browser.py
"""

import base64
import json
import math
import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.report import read, units
from lockstep.report.advice import advise
from lockstep.report.charts import COLOURS, Figure, chart, charts, coloured, line, shortened
from lockstep.report.effective_time import effective_time, in_words
from lockstep.report.read import (
    NEWEST,
    Row,
    RunData,
    flat_config,
    read_run,
    typical,
    typical_step,
    wall_seconds,
)
from lockstep.run_directory import run_files
from lockstep.run_directory.records import RunDirectory

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    " blob:; "
)
_POLICY += "base-uri 'none'; form-action 'none'; connect-src {connect}"
Page = dict[str, Any]
_MOST_BYTES = 950_000  # of a page's data; the scripts and the style have 40,000
NAMES = 24  # of texts and images, and of histograms
TEXT_CHARACTERS = 2_000
_LAST_EVENTS = 200  # of all runs of a page
_EVENT_CHARACTERS = 300
_CONFIG_CHARACTERS = 60_000  # of all runs of a page
_NOTES = 50


def render(data: Page, *, live: bool = False) -> str:
    """Return the whole page of `page_data`.

    `live`: it fetches `data.json` from its server every two seconds.
    """
    template = _read("page.html")
    parts = {
        "TITLE": escape(data["title"]),
        "POLICY": _POLICY.format(connect="'self'" if live else "'none'"),
        "STYLE": _read("page.css"),
        "DRAWING": _read("draw.js"),
        "DATA": json.dumps({**data, "live": live}, allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": _read("page.js"),
    }
    for name, text in parts.items():
        template = template.replace(f"<!--{name}-->", text, 1)
    return template


def page_data(runs: list[RunData], now: float | None = None) -> Page:
    """Return the page's content as plain data."""
    figures = charts(runs)
    note = runs[0].left_out.append
    if len(runs) == 1:
        figures += read.attempted("the histograms", lambda: _histograms(runs[0]), note) or []
    most = shortened(figures)
    share = _CONFIG_CHARACTERS // len(runs)
    thinner = (
        f"Lines are drawn with {most:,} points, wide ones with twice as many; metrics.jsonl has"
        " all."
    )
    page = {
        "title": " · ".join(run.name for run in runs),
        "made": units.moment(time.time() if now is None else now),
        "runs": [_about(run, colour) for run, colour in coloured(runs)],
        "advice": [
            vars(advice) | {"run": run.name if len(runs) > 1 else ""}
            for run in runs
            for advice in advise(run)
        ],
        "charts": figures,
        "left_out": thinner if most else "",
        "tables": [
            *([compared(runs)] if len(runs) > 1 else []),
            *(
                table
                for make in (differences, _operators, _events)
                if (table := read.attempted("a table", partial(make, runs), note))
            ),
        ],
        "not_read": not_read(runs),
        "configs": [
            {"name": run.name, "text": _begun(run.config_text, share)}
            for run in runs
            if run.config_text
        ],
    }
    return page | {"samples": _samples(runs, _MOST_BYTES - len(json.dumps(page)))}


def not_read(runs: Sequence[RunData]) -> list[str]:
    """Return what the page leaves out of the runs' folders, and why."""
    notes = [(run, text) for run in runs for text in dict.fromkeys(run.left_out)]
    notes += [
        (
            run,
            (
                f"rows of metrics.jsonl: {len(run.rows):,} of {run.num_rows:,} are looked at, with"
                " the peaks"
            ),
        )
        for run in runs
        if run.num_rows is not None
    ]
    return [f"{run.name}: {text}" if len(runs) > 1 else text for run, text in notes[:_NOTES]]


def _begun(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}… ({len(text):,} characters)"


def _about(run: RunData, colour: str) -> Page:
    start = run.start
    versions = ", ".join(
        f"{name} {number}" for name, number in (start.get("versions") or {}).items()
    )
    facts = [
        ("strategy", start.get("layout", "")),
        ("ranks", _where(start)),
        ("parameters", f"{start['parameters']:,}" if "parameters" in start else ""),
        ("started", units.moment(start["time"]) if "time" in start else ""),
        ("versions", versions),
        ("directory", str(run.path)),
    ]
    lines = [line for line in start.get("lines") or [] if isinstance(line, str)]
    shown = [(name, str(text)) for name, text in facts if text]
    about = {
        "name": run.name,
        "status": run.status,
        "colour": colour,
        "facts": shown,
        "lines": lines,
    }
    tiles = (
        read.attempted("the figures at the top", lambda: _tiles(run), run.left_out.append)
        if run.rows
        else []
    )
    return about | {"tiles": tiles or []}


def _where(start: Page) -> str:
    ranks = [rank for rank in start.get("ranks") or [] if isinstance(rank, dict)]
    hosts = list(dict.fromkeys(str(rank.get("host")) for rank in ranks))
    devices = list(dict.fromkeys(str(rank.get("device")) for rank in ranks))
    if not ranks:
        return str(start.get("world_size", ""))
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    return f"{len(ranks)} × {' / '.join(devices)} on {shown}"


def _tiles(run: RunData) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of each tile."""
    last = run.rows[-1]
    total = run.start.get("total_steps")
    best = _best_evaluation(run)
    rate, unit = _rate(run)
    mfu = run.last("mfu")
    loss = run.last("loss")
    peak = max((row["memory_bytes"] for row in run.rows if row.get("memory_bytes")), default=0)
    effective, others = in_words(effective_time(run))
    tiles = [
        ("steps", f"{last['step']:,}", f"of {total:,}" if total else ""),
        (
            "loss",
            f"{loss:.4f}" if loss is not None else "–",
            f"best evaluation {best:.4f}" if best is not None else "",
        ),
        ("step time", units.seconds(typical_step(run)), "median"),
        (f"{unit} / s", units.count(rate), "median") if rate else ("", "", ""),
        (
            ("MFU", f"{mfu:.1%}", str(run.start.get("peak_source", "")).partition(":")[0])
            if mfu
            else ("", "", "")
        ),
        ("peak memory", units.size(peak), "rank 0"),
        ("wall time", units.seconds(wall_seconds(run)), ""),
        ("effective time", effective, others) if effective else ("", "", ""),
    ]
    return [tile for tile in tiles if tile[0]]


def _best_evaluation(run: RunData) -> float | None:
    return min(
        (row["eval_loss"] for row in run.evaluations if row.get("eval_loss") is not None),
        default=None,
    )


def _rate(run: RunData) -> tuple[float | None, str]:
    """Return the usual rate, a median like the step's time, and its unit."""
    tokens = typical(run, "tokens_per_second")
    return (tokens, "tokens") if tokens else (typical(run, "samples_per_second") or None, "samples")


def compared(runs: list[RunData]) -> Page:
    """Return the table of the runs' figures."""
    head = [
        "run",
        "status",
        "strategy",
        "steps",
        "last loss",
        "best evaluation",
        "step",
        "rate",
        "MFU",
        "memory",
    ]
    rows = []
    for run in runs:
        best = _best_evaluation(run)
        rate, unit = _rate(run)
        loss, mfu, peak = (run.last(name) for name in ("loss", "mfu", "memory_bytes"))
        rows.append(
            [
                run.name,
                run.status,
                str(run.start.get("layout", "")),
                f"{run.rows[-1]['step']:,}" if run.rows else "0",
                "–" if loss is None else f"{loss:.4f}",
                "–" if best is None else f"{best:.4f}",
                units.seconds(typical_step(run)),
                "–" if not rate else f"{units.count(rate)} {unit} / s",
                "–" if not mfu else f"{mfu:.1%}",
                "–" if not peak else units.size(peak),
            ]
        )
    for name in own_metrics(runs):
        head.append(name)
        for run, row in zip(runs, rows, strict=True):
            value = next(
                (row[name] for row in reversed(run.evaluations) if _is_number(row.get(name))), None
            )
            row.append("–" if value is None else f"{value:.5g}")
    return {"title": "The runs side by side", "head": head, "rows": rows}


def own_metrics(runs: list[RunData]) -> list[str]:
    """Return the names of a user's own numbers, at most six, in the order in which they come."""
    rows = [row for run in runs for row in run.evaluations[-1:]]
    known = ("step", "time", "eval_loss")
    return list(
        dict.fromkeys(
            name for row in rows for name in row if name not in known and _is_number(row[name])
        )
    )[:6]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def best_first(runs: list[RunData]) -> list[RunData]:
    """Return the runs, the best first.

    They are compared by the metric that their configs keep the best of, else by the best evaluation
    loss.
    """
    configs = [flat_config(run.config_text) for run in runs]
    asked = {
        (config.get("checkpoint.keep_best"), config.get("checkpoint.keep_best_mode"))
        for config in configs
    }
    name, mode = asked.pop() if len(asked) == 1 else (None, None)
    name, sign = str(name or "eval_loss"), -1 if mode == "max" and name else 1

    def score(run: RunData) -> float:
        values = [
            sign * row[name] for row in (*run.evaluations, *run.rows) if _is_number(row.get(name))
        ]
        return min(values, default=math.inf)

    return sorted(runs, key=score)


def differences(runs: list[RunData]) -> Page | None:
    """Return the table of the keys in which configs differ; None if there is nothing to tell."""
    configs = (
        [flat_config(run.config_text) | _set_in_python(run) for run in runs]
        if len(runs) > 1
        else []
    )
    keys = dict.fromkeys(key for config in configs for key in config)
    apart = [key for key in keys if len({str(config.get(key)) for config in configs}) > 1]
    rows = [[key, *(str(config.get(key, "–")) for config in configs)] for key in apart]
    head = ["key", *(run.name for run in runs)]
    return {"title": "Where the configs differ", "head": head, "rows": rows} if rows else None


def _set_in_python(run: RunData) -> Row:
    """Return what the run's script gave in Python, where a config says nothing."""
    given = run.start.get("given")
    if not isinstance(given, dict):
        return {}
    return {f"{name} (in Python)": str(value) for name, value in given.items()}


def _operators(runs: list[RunData]) -> Page | None:
    ops = (runs[0].profile or {}).get("operators") or [] if len(runs) == 1 else []
    rows = [
        [op["name"], units.seconds(op["seconds"]), f"{op['share']:.1%}", units.count(op["calls"])]
        for op in ops
    ]
    return (
        {"title": "Top operators", "head": ["operator", "time", "share", "calls"], "rows": rows}
        if rows
        else None
    )


def _events(runs: list[RunData]) -> Page | None:
    several = len(runs) > 1
    last = max(1, _LAST_EVENTS // len(runs))
    rows = [
        [
            *([run.name] if several else []),
            units.moment(event["time"]),
            str(event.get("kind")),
            str(event.get("step", "")),
            _text(event),
        ]
        for run in runs
        for event in run.events[-last:]
    ]
    if not rows:
        return None
    title = f"Events, the last {last}" if any(len(run.events) > last for run in runs) else "Events"
    return {
        "title": title,
        "head": [*(["run"] if several else []), "time", "kind", "step", ""],
        "rows": rows,
        "folded": len(rows) > 12,
    }


def _text(event: Page) -> str:
    shown = {
        k: v
        for k, v in event.items()
        if k in ("checkpoint", "reason", "text", "layout", "sink", "left", "where")
    }
    words = (
        str(value) if key in ("reason", "text") else f"{key} {value}"
        for key, value in shown.items()
    )
    return _begun(", ".join(words), _EVENT_CHARACTERS)


# ---- what a user logged besides numbers ----


def _samples(runs: list[RunData], left: int) -> list[Row]:
    """Return the texts and images of the page, at most `left` bytes of JSON.

    They are {name, note, items} of each name.
    """
    groups: list[tuple[RunData, str, list[Row], list[Row]]] = []
    names_left_out = 0
    for run in runs:
        named = [
            (name, rows) for name, rows in run.media.items() if rows[-1]["kind"] != "histogram"
        ]
        kept = named[-max(1, NAMES // len(runs)) :]
        groups += [(run, name, rows, []) for name, rows in kept]
        names_left_out += len(named) - len(kept)
    for age in range(NEWEST):  # the newest of every name, then the ones before them
        for run, _, rows, items in groups:
            item = _item(run.path, rows[-1 - age], left) if age < len(rows) else {}
            size = len(json.dumps(item))
            if item and size <= left:
                items.append(item)
                left -= size
    shown: list[Row] = []
    for run, name, rows, items in groups:
        where = (
            "metrics.jsonl"
            if rows[-1]["kind"] == "text"
            else RunDirectory(run.path).media.name + "/"
        )
        more = max(len(rows), *(row.get("number", 0) for row in rows)) - len(items)
        note = f"{more} more in {run.name}/{where}" if more > 0 else ""
        shown.append(
            {"name": f"{run.name}: {name}" if len(runs) > 1 else name, "note": note, "items": items}
        )
    if names_left_out:
        shown[0]["note"] += f" {names_left_out} more names are in metrics.jsonl."
    return shown


def _item(run: Path, row: Row, most: int) -> Row:
    """Return the page's form of a text, or of a PNG of the run's folder.

    Empty if it has more than `most` bytes.
    """
    if isinstance(text := row.get("text"), str):
        more = " … (metrics.jsonl has all of it)" if len(text) > TEXT_CHARACTERS else ""
        return {"step": row["step"], "text": text[:TEXT_CHARACTERS] + more}
    if row.get("kind") != "image" or not isinstance(row.get("file"), str):
        return {}
    try:
        data = run_files.read_bytes(
            run, RunDirectory(run).media.name, Path(row["file"]).name, limit=max(0, most)
        )
    except (OSError, ValueError):  # ValueError: a null byte in its name
        return {}
    if not data.startswith(b"\x89PNG\r\n\x1a\n"):
        return {}
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"step": row["step"], "image": source, "size": row.get("size")}


def _histograms(run: RunData) -> list[Figure]:
    """Draw the first and the newest histograms of each name."""
    drawn = []
    named = [(name, rows) for name, rows in run.media.items() if rows[-1]["kind"] == "histogram"]
    for number, (name, rows) in enumerate(named[-NAMES:]):
        marks: list[Row] = []
        for row in (*rows[:1], *rows[1:][-NEWEST + 1 :]):
            counts = row.get("counts")
            edges = row.get("edges")
            if (
                isinstance(counts, list)
                and isinstance(edges, list)
                and len(edges) == len(counts) + 1
            ):
                name_of_row = f"step {row['step']:,}"
                colour = COLOURS[len(marks)]
                marks.append(line(edges, [*counts, *counts[-1:]], name_of_row, colour, step=True))
        note = "Values in each bin, against the value."
        drawn.append(chart(f"histogram-{number}", name, marks, note=note, x={}, y={"zero": True}))
    return drawn


# ---- the file, and the server ----


_MARK = " · Lockstep</title>".encode()
_BEGINNING = 4096  # bytes of a page in which its title is


def write(text: str, path: Path) -> None:
    """Write a page to a file, in place of an earlier one.

    Raises UsageError: it can't be written there.
    """
    require_replaceable(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        run_files.replace_file(path, text.encode(errors="replace"))
    except OSError as error:
        raise UsageError(
            f"{path} can't be written", why=str(error.strerror), fix="name another FILE"
        ) from None


def require_replaceable(path: Path) -> None:
    """Raise a UsageError if something else is where the page is to be.

    A page of Lockstep's is replaced by a newer one.
    """
    if not os.path.lexists(path):
        return
    try:
        with run_files.open_file(path.parent, path.name) as file:
            is_page = _MARK in file.read(_BEGINNING)
    except OSError:
        is_page = False
    if not is_page:
        why = "it is not a page that Lockstep has written, and nothing else is written over"
        raise UsageError(
            f"{path} exists already", why=why, fix="name another FILE, or move it away"
        )


def _read(name: str) -> str:
    return (resources.files("lockstep.report") / name).read_text(encoding="utf-8")


_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]+)?", re.IGNORECASE)


def serve(paths: Sequence[Path], port: int = 0) -> None:
    """Serve run directories until interrupted."""
    with make_server(paths, port) as server, suppress(KeyboardInterrupt):
        print(
            f"lockstep: http://127.0.0.1:{server.server_address[1]}/ (Ctrl+C stops it)", flush=True
        )
        server.serve_forever()


def make_server(paths: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """Make a server on loopback that does not serve yet."""
    seen: list[tuple[int, int]] = []
    page: Page = {}

    def data() -> Page:
        """Read the run directories again if their files have changed."""
        nonlocal page, seen
        now = [_state(path / name) for path in paths for name in ("metrics.jsonl", "events.jsonl")]
        if now != seen or any(run["status"] == "running" for run in page["runs"]):
            page = page_data([read_run(path, among=len(paths)) for path in paths])
            seen = now
        return page

    data()  # raises what is wrong with a path

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer with the page or its data, to this machine alone."""
            # Another site whose name resolves to this address must not read the run.
            if not _OWN_HOST.fullmatch(self.headers.get("Host", "")):
                self._answer(403, "text/plain", b"this page is for this machine")
            elif self.path == "/":
                self._answer(
                    200,
                    "text/html; charset=utf-8",
                    render(data(), live=True).encode(errors="replace"),
                )
            elif self.path == "/data.json":
                self._answer(200, "application/json", json.dumps(data(), allow_nan=False).encode())
            else:
                self._answer(404, "text/plain", b"there is no such page")

        def _answer(self, code: int, kind: str, body: bytes) -> None:
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            with suppress(ConnectionError):  # the reader has gone
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log no requests."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:  # taken, or not a port
        raise UsageError(
            f"port {port} can't be used on this machine: {error}", fix="--port 0: any"
        ) from None


def _state(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size
