"""The page: one HTML file that holds its data, its style and plotly.js, and asks nobody for anything.

Its content security policy forbids every request (served live: all but to the server it came from). What runs say
about themselves, names and configs, goes into the page as data and is shown as text, never as markup.
"""

import json
import time
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.report import times, words
from lockstep.report.advice import advise
from lockstep.report.charts import charts
from lockstep.report.drawing import COLOURS
from lockstep.report.read import Run, flat_config

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'; connect-src {connect}"
)
Page = dict[str, Any]
_LAST_EVENTS = 200  # that are shown of a run


def render(data: Page, *, live: bool = False) -> str:
    """The whole page.

    Args:
        live: it asks the server that it came from for `data.json` every two seconds.

    Raises:
        UsageError: plotly is not installed.
    """
    template = _read("page.html")
    parts = {
        "TITLE": escape(data["title"]),
        "POLICY": _POLICY.format(connect="'self'" if live else "'none'"),
        "STYLE": _read("page.css"),
        "PLOTLY": plotly_js(),
        "DATA": json.dumps({**data, "live": live}, allow_nan=False).replace("<", "\\u003c"),
        "SCRIPT": _read("page.js"),
    }
    for name, text in parts.items():
        template = template.replace(f"<!--{name}-->", text, 1)
    return template


def plotly_js() -> str:
    """plotly.js, from the package plotly.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    except ModuleNotFoundError:
        raise UsageError(
            "reports are drawn by plotly, which is not installed", fix="pip install 'lockstep-train[report]'"
        ) from None


def page_data(runs: list[Run], now: float | None = None) -> Page:
    """All that the page shows, as plain data."""
    names = [run.name for run in runs]
    return {
        "title": " · ".join(names),
        "made": words.moment(time.time() if now is None else now),
        "runs": [_about(run, COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs)],
        "advice": [vars(advice) | {"run": run.name if len(runs) > 1 else ""} for run in runs for advice in advise(run)],
        "charts": charts(runs),
        "tables": [table for table in (_compared(runs), _differences(runs), _operators(runs), _events(runs)) if table],
        "configs": [{"name": run.name, "text": run.config_text} for run in runs if run.config_text],
    }


def _about(run: Run, colour: str) -> Page:
    start, rows = run.start, run.rows
    versions = ", ".join(f"{name} {number}" for name, number in (start.get("versions") or {}).items())
    facts = [
        ("strategy", start.get("layout", "")),
        ("ranks", _where(start)),
        ("parameters", f"{start['parameters']:,}" if "parameters" in start else ""),
        ("started", words.moment(start["time"]) if "time" in start else ""),
        ("versions", versions),
        ("directory", str(run.path)),
    ]
    said = [line for line in start.get("lines") or [] if isinstance(line, str)]
    return {
        "name": run.name,
        "status": run.status,
        "colour": colour,
        "facts": [(name, str(text)) for name, text in facts if text],
        "lines": said,
        "tiles": _tiles(run) if rows else [],
    }


def _where(start: Page) -> str:
    ranks = [rank for rank in start.get("ranks") or [] if isinstance(rank, dict)]
    hosts = list(dict.fromkeys(str(rank.get("host")) for rank in ranks))
    devices = list(dict.fromkeys(str(rank.get("device")) for rank in ranks))
    if not ranks:
        return str(start.get("world_size", ""))
    shown = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    return f"{len(ranks)} × {' / '.join(devices)} on {shown}"


def _tiles(run: Run) -> list[tuple[str, str, str]]:
    """(name, value, note)"""
    last, total = run.rows[-1], run.start.get("total_steps")
    best = min((row["eval_loss"] for row in run.evaluations if row.get("eval_loss") is not None), default=None)
    step, (rate, unit), mfu = times.typical_step(run), _rate(run), run.last("mfu")
    peak = max((row["memory_bytes"] for row in run.rows if row.get("memory_bytes")), default=0)
    loss = run.last("loss")
    tiles = [
        ("steps", f"{last['step']:,}", f"of {total:,}" if total else ""),
        ("loss", f"{loss:.4f}" if loss is not None else "–", f"best evaluation {best:.4f}" if best is not None else ""),
        ("step time", words.seconds(step), "median"),
        (f"{unit} / s", words.count(rate), "") if rate else ("", "", ""),
        ("MFU", f"{mfu:.1%}", str(run.start.get("peak_source", "")).partition(":")[0]) if mfu else ("", "", ""),
        ("peak memory", words.size(peak), "rank 0"),
        ("wall time", words.seconds(times.wall_seconds(run)), ""),
    ]
    return [tile for tile in tiles if tile[0]]


def _rate(run: Run) -> tuple[float | None, str]:
    """The newest rate, and what it counts."""
    tokens = run.last("tokens_per_second")
    return (tokens, "tokens") if tokens else (run.last("samples_per_second"), "samples")


# ---- tables: {title, head, rows} ----


def _compared(runs: list[Run]) -> Page | None:
    if len(runs) < 2:
        return None
    rows = [[run.name, run.status, str(run.start.get("layout", "")), *_numbers(run)] for run in runs]
    head = ["run", "status", "strategy", "steps", "last loss", "best evaluation", "step", "rate", "MFU", "memory"]
    return {"title": "The runs side by side", "head": head, "rows": rows}


def _numbers(run: Run) -> list[str]:
    best = min((row["eval_loss"] for row in run.evaluations if row.get("eval_loss") is not None), default=None)
    loss, mfu, peak = (run.last(name) for name in ("loss", "mfu", "memory_bytes"))
    rate, unit = _rate(run)
    return [
        f"{run.rows[-1]['step']:,}" if run.rows else "0",
        "–" if loss is None else f"{loss:.4f}",
        "–" if best is None else f"{best:.4f}",
        words.seconds(times.typical_step(run)),
        "–" if not rate else f"{words.count(rate)} {unit} / s",
        "–" if not mfu else f"{mfu:.1%}",
        "–" if not peak else words.size(peak),
    ]


def _differences(runs: list[Run]) -> Page | None:
    configs = [flat_config(run.config_text) for run in runs]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    rows = [
        [key, *(str(config.get(key, "–")) for config in configs)]
        for key in keys
        if len({str(config.get(key)) for config in configs}) > 1
    ]
    if len(runs) < 2 or not rows:
        return None
    return {"title": "Where the configs differ", "head": ["key", *(run.name for run in runs)], "rows": rows}


def _operators(runs: list[Run]) -> Page | None:
    found = (runs[0].profile or {}).get("operators") if len(runs) == 1 else None
    if not found:
        return None
    rows = [[op["name"], words.seconds(op["seconds"]), f"{op['share']:.1%}", f"{op['calls']:,}"] for op in found]
    return {"title": "Top operators", "head": ["operator", "time", "share", "calls"], "rows": rows}


def _events(runs: list[Run]) -> Page | None:
    several = len(runs) > 1
    rows = [
        [*([run.name] if several else []), words.moment(event["time"]), str(event.get("kind")),
         str(event.get("step", "")), _text(event)]
        for run in runs for event in run.events[-_LAST_EVENTS:]
    ]  # fmt: skip
    if not rows:
        return None
    return {"title": "Events", "head": [*(["run"] if several else []), "time", "kind", "step", ""], "rows": rows,
            "folded": len(rows) > 12}  # fmt: skip


def _text(event: Page) -> str:
    shown = {k: v for k, v in event.items() if k in ("checkpoint", "reason", "text", "layout", "sink", "left", "where")}
    return ", ".join(str(value) if key in ("reason", "text") else f"{key} {value}" for key, value in shown.items())


def write(runs: list[Run], path: Path) -> None:
    """The page as a file; whole or not at all."""
    text = render(page_data(runs))
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise UsageError(f"{path} can't be written", why=str(error.strerror), fix="-o FILE names another") from None


def _read(name: str) -> str:
    return (resources.files("lockstep.report") / name).read_text(encoding="utf-8")
