"""Draws a run as a row of small SVG charts for a notebook's output.

They show loss, throughput, and metrics of one's own.

Plain SVG in HTML without scripts: every front end shows it, and what is saved with the notebook
stays as it is.

Tests: tests/report/test_hostile.py, tests/test_examples.py
"""

from collections.abc import Sequence
from html import escape

from lockstep.report import units
from lockstep.report.read import RunData, smoothed, thinned

# The size of a chart, in pixels.
WIDTH = 300
HEIGHT = 130
_POINTS = 200
_MOST_CHARTS = 6
_STYLE = (
    f"font: 12px system-ui, sans-serif; width: {WIDTH}px; margin: 0 16px 12px 0; display:"
    " inline-block"
)
Series = list[tuple[int, float]]


def sketch(run: RunData) -> str:
    """Return the charts as HTML; a sentence while nothing is recorded."""
    charts = [_chart(name, lines) for name, lines in _lines_of(run).items() if any(lines)]
    if not charts:
        return f"<p>{escape(run.name)}: no step is logged yet</p>"
    total = run.start.get("total_steps")
    of = f" of {total:,}" if total else ""
    step = max([row["step"] for row in (*run.rows[-1:], *run.evaluations[-1:])])
    title = f"<div><b>{escape(run.name)}</b> · {run.status} · step {step:,}{of}</div>"
    return (
        '<div style="font: 13px system-ui,'
        f' sans-serif">{title}{"".join(charts[:_MOST_CHARTS])}</div>'
    )


def _lines_of(run: RunData) -> dict[str, list[Series]]:
    """Return title → lines: of training, and of evaluation."""
    losses = _series(run, "loss")
    trained = list(
        zip([s for s, _ in losses], smoothed([v for _, v in losses], len(losses) / 50), strict=True)
    )
    series: dict[str, list[Series]] = {
        "loss": [[(s, v) for s, v in trained if v is not None], _series(run, "eval_loss")],
        "tokens per second": [_series(run, "tokens_per_second")],
    }
    if not any(series["tokens per second"]):
        series["samples per second"] = [_series(run, "samples_per_second")]
    names = {
        name: None
        for row in run.evaluations
        for name in row
        if name not in ("step", "time", "eval_loss")
    }
    return series | {name: [_series(run, name)] for name in names}


def _series(run: RunData, name: str) -> Series:
    rows = [row for row in (*run.rows, *run.evaluations) if isinstance(row.get(name), int | float)]
    return sorted((row["step"], float(row[name])) for row in rows)


def _chart(title: str, lines: Sequence[Series]) -> str:
    """Return one chart as an SVG element."""
    points = [point for line in lines for point in line]
    steps = [s for s, _ in points]
    values = [v for _, v in points]
    first = min(steps)
    last = max(steps)
    low = min(values)
    high = max(values)

    def point(step: int, value: float) -> str:
        x = (step - first) / max(1, last - first) * (WIDTH - 2) + 1
        return f"{x:.1f},{HEIGHT - 1 - (value - low) / ((high - low) or 1.0) * (HEIGHT - 2):.1f}"

    drawn = ""
    for line, colour in zip(lines, ("#2f6bda", "#e07b2c"), strict=False):
        if not line:
            continue
        kept = [line[i] for i in thinned([value for _, value in line], _POINTS)]
        drawn += (
            f'<polyline points="{" ".join(point(*each) for each in kept)}" fill="none"'
            f' stroke="{colour}" />'
        )
        if len(kept) < _POINTS / 10:
            for x, y in (point(*each).split(",") for each in kept):
                drawn += f'<circle cx="{x}" cy="{y}" r="2" fill="{colour}" />'
    newest = f", evaluation {_number(lines[1][-1][1])}" if len(lines) > 1 and lines[1] else ""
    now = f"{_number(lines[0][-1][1])}{newest}" if lines[0] else newest
    return (
        f'<div style="{_STYLE}">{escape(title)}: {now}<svg width="{WIDTH}" height="{HEIGHT}"'
        f' style="border: 1px solid #8884; display: block">{drawn}</svg>{_number(low)} to'
        f" {_number(high)}, steps {first:,} to {last:,}</div>"
    )


def _number(value: float) -> str:
    return units.count(value) if abs(value) >= 100 else f"{value:.4g}"
