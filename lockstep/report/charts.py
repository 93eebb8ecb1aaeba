"""Draws figures as plain data for plotly.js and lines.js; a colour `@name` is one of the page's light or dark theme."""

from collections.abc import Callable, Sequence
from itertools import accumulate, product
from math import ceil, floor, log10
from typing import Any

from lockstep.report.read import (
    PAUSES,
    PHASE_NAMES,
    STEP_PHASES,
    Row,
    RunData,
    phase_seconds,
    phase_totals,
    smoothed,
    step_shares,
    thinned,
    typical_step,
)

# ---- parts of every figure ----


Figure = dict[str, Any]
COLOURS = ("@c1", "@c2", "@c3", "@c4", "@c5", "@c6")
GIB = 2**30


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


# ---- the figures ----


_PHASE_COLOURS = {
    "forward_backward": "@c1", "data": "@c2", "communication": "@c4", "optimizer": "@c3", "evaluation": "@c5",
    "checkpoint": "@c6", "other": "@c7", "outside": "@c8",
}  # fmt: skip


def charts(runs: list[RunData]) -> list[Figure]:
    """Return all figures that can be drawn of these runs, in the page's order."""
    made = [loss(runs), *(loss_against(runs)[1:] if len(runs) > 1 else [])]
    made += [draw(runs) for draw in (throughput, phases, whole_time)]
    if len(runs) == 1:
        made += [draw(runs[0]) for draw in (ranks, own_time, memory)]
    made += own_metrics(runs)
    made += [number(runs, *args) for args in _NUMBERS]
    if len(runs) == 1:
        made += [*profile_charts(runs[0]), layers(runs[0])]
    made.append(timeline(runs))
    return [figure for figure in made if figure is not None and figure["data"]]


# ---- loss and numbers of the records ----


def loss(runs: list[RunData]) -> Figure | None:
    """Draw the loss of training and evaluation."""
    data: list[Row] = []
    lowest, highest = float("inf"), 0.0
    for run, colour in zip(runs, cycle(runs), strict=True):
        steps, values = run.series("loss")
        several = len(runs) > 1
        if len(values) > 40:
            data.append(line(steps, values, "each logged step", colour, opacity=0.28, width=1, hoverinfo="skip",
                             showlegend=False))  # fmt: skip
            values = smoothed(values, max(5.0, len(values) / 50))
        data.append(line(steps, values, run.name if several else "training", colour))
        numbers = [v for v in values if v is not None]
        lowest, highest = min([lowest, *numbers]), max([highest, *numbers])
        evaluations = [(row["step"], row["eval_loss"]) for row in run.evaluations if row.get("eval_loss") is not None]
        if evaluations:
            data.append({
                "type": "scatter", "mode": "lines+markers", "x": [s for s, _ in evaluations],
                "y": [short(v) for _, v in evaluations],
                "name": f"{run.name}, evaluation" if several else "evaluation",
                "line": {"color": colour if several else "@c2", "width": 1.5, "dash": "dot"}, "marker": {"size": 7},
            })  # fmt: skip
    log = lowest > 0 and highest > 20 * lowest
    marks = [mark for run in runs for mark in _restart_marks(run)]
    note = "Mean over the valid targets of a step."
    note += " Thin: each logged step; thick: the moving mean." if any(len(run.rows) > 40 for run in runs) else ""
    if marks:
        note += " Dashed lines: the run was resumed from a checkpoint."
    return chart(
        "loss", "Loss", data, note=note.strip(), wide=True, shapes=marks, xaxis={"title": {"text": "step"}},
        yaxis=log_axis([lowest, highest]) if log else {},
    )  # fmt: skip


LINES_AT_MOST = 24  # runs in a chart
_POINTS = 300  # of a line, where there are many


def loss_against(runs: list[RunData], note: str = "") -> list[Figure]:
    """Draw the loss of several runs against steps, tokens (or samples) and seconds."""
    shown = runs[:LINES_AT_MOST]
    unit = "tokens" if all(run.last("tokens_per_second") for run in shown) else "samples"
    figures = []
    for name, of_run in (("steps", _steps), (unit, lambda run: _summed(run, unit)), ("seconds", _seconds)):
        data, values = [], []
        for place, (run, colour) in enumerate(zip(shown, cycle(shown), strict=True)):
            x = dict(zip((row["step"] for row in run.rows), of_run(run), strict=True))
            known = [row for row in run.rows if row.get("loss") is not None]
            smooth = smoothed([row["loss"] for row in known], max(1.0, len(known) / 50))
            keep = thinned(smooth, _POINTS)
            dash = ("solid", "dash", "dot")[place // len(COLOURS) % 3]
            data.append(line([short(x[known[i]["step"]]) for i in keep], [smooth[i] for i in keep], run.name, colour,
                             line={"dash": dash}, mode=mode(keep)))  # fmt: skip
            values += [value for value in smooth if value is not None]
        log = bool(values) and min(values) > 0 and max(values) > 20 * min(values)
        figures.append(chart(f"loss-{name}", f"Loss against {name}", data, note=note, wide=name == "steps",
                             xaxis={"title": {"text": name}}, yaxis=log_axis(values) if log else {}))  # fmt: skip
    return figures


def _steps(run: RunData) -> list[float]:
    return [row["step"] for row in run.rows]


def _summed(run: RunData, name: str) -> list[float]:
    """Return the tokens or samples up to each row, which stands for the steps since the one before."""
    steps = [0, *(row["step"] for row in run.rows)]
    each = [(row.get(name) or 0.0) * (after - before)
            for row, before, after in zip(run.rows, steps, steps[1:], strict=False)]  # fmt: skip
    return list(accumulate(each))


def _seconds(run: RunData) -> list[float]:
    """Return the seconds from the first sign of the run to each row."""
    times = [row.get("time") or 0.0 for row in run.rows]
    begun = min([event["time"] for event in run.events] + [time for time in times if time], default=0.0)
    return [max(0.0, time - begun) for time in times]


def _restart_marks(run: RunData) -> list[Row]:
    steps = {event["step"] for event in run.of_kind("resume") if isinstance(event.get("step"), int)}
    return [
        {"type": "line", "xref": "x", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1,
         "line": {"color": "@c4", "width": 1.5, "dash": "dash"}}
        for step in sorted(steps)
    ]  # fmt: skip


_NUMBERS: tuple[tuple[str, str, str, str], ...] = (
    ("lr", "Learning rate", "linear", "Of the first group of parameters."),
    ("grad_norm", "Gradient norm", "log", "2-norm before clipping, over all shards and stages."),
    ("loss_scale", "Loss scale", "log", "For fp16; it is halved when a step is skipped."),
    ("mfu", "Model FLOPs utilisation", "linear", "FLOPs per second, as a share of the devices' peak."),
    ("hfu", "Hardware FLOPs utilisation", "linear", "Like MFU, but recomputed activations count twice."),
)


def number(runs: list[RunData], name: str, title: str, axis: str, note: str) -> Figure | None:
    """Draw one number of the records over the steps."""
    data = []
    for run, colour in zip(runs, cycle(runs), strict=True):
        steps, values = run.series(name)
        if values:
            data.append(line(steps, values, run.name, colour, showlegend=len(runs) > 1, mode=mode(values)))
    scale: Row = {"tickformat": ".2~%", "rangemode": "tozero"} if name in ("mfu", "hfu") else {}
    if axis == "log":
        scale = log_axis([value for trace in data for value in trace["y"]])
    return chart(name, title, data, note=note, xaxis={"title": {"text": "step"}}, yaxis=scale)


def own_metrics(runs: list[RunData]) -> list[Figure]:
    """Draw each metric of the evaluations, and each number that the user logged."""
    known = {"step", "time", "eval_loss"}
    names = {
        key: None for run in runs for row in run.evaluations for key, v in row.items() if isinstance(v, float | int)
    }
    drawn = []
    for place, name in enumerate(name for name in names if name not in known):
        data = []
        for run, colour in zip(runs, cycle(runs), strict=True):
            found = [(row["step"], row[name]) for row in run.evaluations if row.get(name) is not None]
            steps, values = [step for step, _ in found], [value for _, value in found]
            if found:
                data.append(line(steps, values, run.name, colour, showlegend=len(runs) > 1, mode="lines+markers"))
        drawn.append(chart(f"own-{place}", name, data, xaxis={"title": {"text": "step"}}))
    return drawn


def layers(run: RunData) -> Figure | None:
    """Draw the gradient norm of each layer as a heat map."""
    rows = [row for row in run.rows if row.get("gradient_norms")]
    if not rows:
        return None
    names = list(rows[-1]["gradient_norms"])
    keep = [rows[i] for i in thinned([row["loss"] for row in rows], 300)]
    z = [[row["gradient_norms"].get(name) for row in keep] for name in names]
    logs = [[None if not v else short(log10(v)) for v in values] for values in z]
    ticks = log_ticks([value for values in z for value in values])
    heat = {
        "type": "heatmap", "x": [row["step"] for row in keep], "y": names, "z": logs, "text": z, "colorscale": "@scale",
        "hovertemplate": "step %{x}, %{y}: %{text:.3g}<extra></extra>",
        "colorbar": {"thickness": 10, "outlinewidth": 0, "tickvals": [log10(tick) for tick in ticks],
                     "ticktext": [f"{tick:g}" for tick in ticks]},
    }  # fmt: skip
    return chart("layers", "Gradient norm by layer", [heat], note="2-norm before clipping; logarithmic.", wide=True,
                 xaxis={"title": {"text": "step"}}, yaxis={"autorange": "reversed"})  # fmt: skip


# ---- speed ----


def throughput(runs: list[RunData]) -> Figure | None:
    """Draw samples or tokens per second."""
    tokens = all(run.last("tokens_per_second") for run in runs)
    data = []
    for run, colour in zip(runs, cycle(runs), strict=True):
        rows = [row for row in run.rows if row.get("step_seconds")]
        value: Callable[[Row], float | None] = _tokens if tokens else _samples
        values = [value(row) for row in rows]
        data.append(line([r["step"] for r in rows], values, run.name, colour, showlegend=len(runs) > 1))
    unit = "tokens per second" if tokens else "samples per second"
    return chart("throughput", "Throughput", data, note=f"{unit.capitalize()}, over all ranks.",
                 xaxis={"title": {"text": "step"}}, yaxis={"rangemode": "tozero", "ticksuffix": " /s"})  # fmt: skip


def _tokens(row: Row) -> float | None:
    return row.get("tokens_per_second")


def _samples(row: Row) -> float | None:
    return float(row.get("samples") or 0) / float(row["step_seconds"])


def phases(runs: list[RunData]) -> Figure | None:
    """Draw the time per phase of a step: stacked over the steps for one run, one bar each for several."""
    if len(runs) > 1:
        return _phase_bars(runs)
    rows = runs[0].gathered
    keep = [rows[i] for i in thinned([row["loss"] for row in rows], 600)]
    factor, sign, unit = moments(max((row.get("step_seconds") or 0.0 for row in rows), default=0.0))
    data = [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "step", "name": PHASE_NAMES[phase],
            "x": [row["step"] for row in keep], "y": [short(phase_seconds(row, phase) * factor) for row in keep],
            "line": {"width": 0.5, "color": _PHASE_COLOURS[phase]}, "fillcolor": _PHASE_COLOURS[phase],
            "hovertemplate": f"%{{y:.3g}}{sign}",
        }
        for phase in STEP_PHASES if any(phase_seconds(row, phase) for row in rows)
    ]  # fmt: skip
    return chart("phases", "Time per phase", data if len(rows) > 1 else [],
                 note=f"{unit} per step, of the median rank.", xaxis={"title": {"text": "step"}},
                 yaxis={"rangemode": "tozero", "ticksuffix": sign})  # fmt: skip


def _phase_bars(runs: list[RunData]) -> Figure:
    seconds = [(run, step_shares(run), typical_step(run)) for run in runs]
    known = [(run.name, {p: s * step for p, s in shares.items()}) for run, shares, step in seconds if shares]
    data = [
        {"type": "bar", "orientation": "h", "name": PHASE_NAMES[phase], "y": [name for name, _ in known],
         "x": [short(values[phase] * 1e3) for _, values in known], "marker": {"color": _PHASE_COLOURS[phase]},
         "hovertemplate": "%{x:.3g} ms"}
        for phase in STEP_PHASES if any(values[phase] for _, values in known)
    ]  # fmt: skip
    return chart("phases", "Time per phase", data, note="Milliseconds of a typical step, of the median rank.",
                 barmode="stack", xaxis={"ticksuffix": " ms"}, yaxis={"autorange": "reversed"})  # fmt: skip


def whole_time(runs: list[RunData]) -> Figure | None:
    """Draw where the wall time went: one bar per run."""
    known = [(run.name, phase_totals(run)) for run in runs if run.gathered]
    data = [
        {"type": "bar", "orientation": "h", "name": PHASE_NAMES[phase], "y": [name for name, _ in known],
         "x": [short(seconds.get(phase, 0.0)) for _, seconds in known], "marker": {"color": _PHASE_COLOURS[phase]},
         "hovertemplate": "%{x:.4g} s"}
        for phase in (*STEP_PHASES, *PAUSES, "outside")
        if any(seconds.get(phase) for _, seconds in known)
    ]  # fmt: skip
    return chart("time", "Where the time went", data, note="Seconds of the whole run.", barmode="stack",
                 xaxis={"ticksuffix": " s"}, yaxis={"visible": len(runs) > 1, "autorange": "reversed"},
                 short=len(runs) < 3)  # fmt: skip


# ---- ranks ----


def ranks(run: RunData) -> Figure | None:
    """Draw each rank's own time over the median as a heat map, where a slow rank is a stripe."""
    rows = [row for row in run.gathered if row.get("own_seconds")]
    if not rows:
        return None
    keep = [rows[i] for i in thinned([max(row["own_seconds"]) for row in rows], 400)]
    middle = [sorted(row["own_seconds"])[(len(row["own_seconds"]) - 1) // 2] or 1.0 for row in keep]
    count = max(len(row["own_seconds"]) for row in keep)
    z = [
        [short(row["own_seconds"][rank] / m) if rank < len(row["own_seconds"]) else None
         for row, m in zip(keep, middle, strict=True)]
        for rank in range(count)
    ]  # fmt: skip
    highest = max(1.3, *(value for values in z for value in values if value is not None))
    heat = {
        "type": "heatmap", "x": [row["step"] for row in keep], "y": [f"rank {rank}" for rank in range(count)], "z": z,
        "zmin": 1.0, "zmax": highest, "colorscale": "@scale",
        "hovertemplate": "step %{x}, %{y}: %{z:.2f} ×<extra></extra>",
        "colorbar": {"thickness": 10, "ticksuffix": " ×", "outlinewidth": 0},
    }  # fmt: skip
    return chart("ranks", "Skew of the ranks", [heat],
                 note="A rank's own time in a step, without waiting, over that of the median rank.",
                 xaxis={"title": {"text": "step"}}, yaxis={"autorange": "reversed"})  # fmt: skip


def own_time(run: RunData) -> Figure | None:
    """Draw the slowest rank and the median, for the phases that differ."""
    rows = run.gathered
    if not rows or not any(row.get("own_seconds") for row in rows):
        return None
    data = []
    factor, sign, unit = moments(max(phase_seconds(row, "forward_backward", 2) for row in rows))
    for phase in ("data", "forward_backward", "communication"):
        if any(phase_seconds(row, phase, 2) for row in rows):
            steps = [row["step"] for row in rows]
            most, middle = ([phase_seconds(row, phase, place) * factor for row in rows] for place in (2, 1))
            data.append(line(steps, most, f"{PHASE_NAMES[phase]}, most", _PHASE_COLOURS[phase]))
            data.append(line(steps, middle, "median", _PHASE_COLOURS[phase], width=1, line={"dash": "dot"},
                             showlegend=False))  # fmt: skip
    return chart("spread", "Slowest rank and median", data, note=f"{unit} per step; dotted: the median.",
                 xaxis={"title": {"text": "step"}}, yaxis={"rangemode": "tozero", "ticksuffix": sign})  # fmt: skip


def memory(run: RunData) -> Figure | None:
    """Draw the memory of the rank that holds most."""
    rows = [row for row in run.gathered if row.get("memory")]
    names = {"peak": "peak", "reserved": "reserved", "allocated": "allocated", "host": "host, resident"}
    data, colours = [], iter(COLOURS)
    for name, label in names.items():
        found = [(row["step"], row["memory"][name][2] / GIB) for row in rows if name in row["memory"]]
        if found:
            data.append(line([s for s, _ in found], [v for _, v in found], label, next(colours), mode=mode(found)))
    shapes = []
    total = rows[-1]["memory"]["total"][2] / GIB if rows else 0.0
    if rows and "reserved" in rows[-1]["memory"] and rows[-1]["memory"]["reserved"][2] / GIB > 0.3 * total:
        shapes.append({"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": total, "y1": total,
                       "line": {"color": "@c4", "width": 1, "dash": "dot"}})  # fmt: skip
    return chart("memory", "Memory", data, note="GiB of the rank that holds most."
                 + (" Dotted: the GPU's memory." if shapes else ""), shapes=shapes, xaxis={"title": {"text": "step"}},
                 yaxis={"rangemode": "tozero", "ticksuffix": " GiB"})  # fmt: skip


# ---- events ----

_KINDS = {
    "start": ("@c1", "circle"), "resume": ("@c2", "diamond"), "save": ("@c3", "square"), "stop": ("@c1", "x"),
    "restart": ("@c4", "triangle-up"), "fault": ("@c4", "star"), "straggler": ("@c6", "triangle-down"),
    "profile": ("@c5", "pentagon"),
}  # fmt: skip
_NOT_DRAWN = ("save_stall", "prometheus")


def timeline(runs: list[RunData]) -> Figure | None:
    """Draw the events of the runs over time."""
    data: list[Row] = []
    several = len(runs) > 1
    begun = {id(run): min((event["time"] for event in run.events), default=0.0) for run in runs}
    for kind in dict.fromkeys(e["kind"] for run in runs for e in run.events if e["kind"] not in _NOT_DRAWN):
        colour, symbol = _KINDS.get(kind, ("@c4", "star"))
        points = [(run, event) for run in runs for event in run.of_kind(kind)]
        data.append({
            "type": "scatter", "mode": "markers", "name": kind, "showlegend": several,
            "x": [short((event["time"] - begun[id(run)]) / 60) for run, event in points],
            "y": [run.name if several else kind for run, _ in points],
            "text": [_about(event) for _, event in points], "hovertemplate": "%{x:.2f} min: %{text}<extra></extra>",
            "marker": {"color": colour, "symbol": symbol, "size": 10, "line": {"width": 1, "color": "@card"}},
        })  # fmt: skip
    return chart("timeline", "Time line", data, note="Minutes since the first start: checkpoints, faults, restarts.",
                 wide=True, hovermode="closest", xaxis={"ticksuffix": " min"}, yaxis={"autorange": "reversed"},
                 short=len(data) < 4)  # fmt: skip


def _about(event: Row) -> str:
    parts = [str(event["kind"])]
    parts += [f"step {event['step']}"] if "step" in event else []
    parts += [str(event[key]).splitlines()[0][:120] for key in ("checkpoint", "reason", "text") if event.get(key)]
    return ", ".join(parts)


# ---- the newest profile ----

_PARTS = {"compute": "@c1", "overlapped communication": "@c3", "exposed communication": "@c4", "idle": "@c8"}
_MIB = 2**20


def profile_charts(run: RunData) -> list[Figure]:
    """Draw the newest profile of a run; the figures are empty if there is none."""
    return [profile_shares(run), profile_memory(run)]


def profile_shares(run: RunData) -> Figure:
    """Draw a bar for each traced rank."""
    profile = run.profile or {}
    ranks = profile.get("ranks") or []
    data = [
        {"type": "bar", "orientation": "h", "name": part, "y": [f"rank {rank['rank']}" for rank in ranks],
         "x": [short(rank["shares"][part]) for rank in ranks], "marker": {"color": colour},
         "hovertemplate": "%{x:.1%}"}
        for part, colour in _PARTS.items() if any(rank["shares"].get(part) for rank in ranks)
    ]  # fmt: skip
    note = f"{profile.get('about', '')} {profile.get('verdict', '')}".strip()
    return chart("profile", "Profile", data, note=note, barmode="stack",
                 xaxis={"tickformat": ".0%", "range": [0, 1]}, yaxis={"autorange": "reversed"},
                 short=len(ranks) < 3)  # fmt: skip


def profile_memory(run: RunData) -> Figure:
    """Draw the memory that was allocated since the trace began."""
    curve = (run.profile or {}).get("memory") or []
    factor, sign, _ = moments(max((when for when, _ in curve), default=0.0))
    most = max((size for _, size in curve), default=0.0)
    unit, name = (GIB, "GiB") if most > GIB else (_MIB, "MiB")
    data = [line([short(when * factor) for when, _ in curve], [size / unit for _, size in curve], "held", "@c1",
                 line={"shape": "hv"}, showlegend=False)] if curve else []  # fmt: skip
    return chart("profile-memory", "Memory in the profile", data,
                 note="Allocated since the trace began, by the first traced rank.",
                 xaxis={"ticksuffix": sign}, yaxis={"ticksuffix": f" {name}"})  # fmt: skip
