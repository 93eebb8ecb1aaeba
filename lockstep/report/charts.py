"""Figures as plain data for plotly.js. A colour is `@name`: the page puts in its own, of the light or dark theme."""

from collections.abc import Callable
from math import log10

from lockstep.report import times
from lockstep.report.drawing import (
    COLOURS,
    GIB,
    Figure,
    chart,
    cycle,
    line,
    log_axis,
    log_ticks,
    mode,
    moments,
    short,
)
from lockstep.report.profile_charts import profile_charts
from lockstep.report.read import Row, Run
from lockstep.report.thin import smoothed, thinned

_PHASE_COLOURS = {
    "forward_backward": "@c1", "data": "@c2", "communication": "@c4", "optimizer": "@c3", "evaluation": "@c5",
    "checkpoint": "@c6", "other": "@c7", "outside": "@c8",
}  # fmt: skip


def charts(runs: list[Run]) -> list[Figure]:
    """All that can be drawn of these runs, in the order of the page."""
    made = [draw(runs) for draw in (loss, throughput, phases, whole_time)]
    if len(runs) == 1:
        made += [draw(runs[0]) for draw in (ranks, own_time, memory)]
    made += [number(runs, *args) for args in _NUMBERS]
    if len(runs) == 1:
        made += [*profile_charts(runs[0]), layers(runs[0])]
    made.append(timeline(runs))
    return [figure for figure in made if figure is not None and figure["data"]]


# ---- what it learns ----


def loss(runs: list[Run]) -> Figure | None:
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
    note = "Thin: each logged step; thick: their moving mean." if any(len(run.rows) > 40 for run in runs) else ""
    if marks:
        note += " Dashed lines: the run went on from a checkpoint."
    return chart(
        "loss", "Loss", data, note=note.strip(), wide=True, shapes=marks, xaxis={"title": {"text": "step"}},
        yaxis=log_axis([lowest, highest]) if log else {},
    )  # fmt: skip


def _restart_marks(run: Run) -> list[Row]:
    steps = {event["step"] for event in run.of_kind("resume") if isinstance(event.get("step"), int)}
    return [
        {"type": "line", "xref": "x", "yref": "paper", "x0": step, "x1": step, "y0": 0, "y1": 1,
         "line": {"color": "@c4", "width": 1.5, "dash": "dash"}}
        for step in sorted(steps)
    ]  # fmt: skip


_NUMBERS: tuple[tuple[str, str, str, str], ...] = (
    ("lr", "Learning rate", "linear", ""),
    ("grad_norm", "Gradient norm", "log", "Before clipping, over all shards and stages."),
    ("loss_scale", "Loss scale", "log", "Of fp16; it halves when a step is skipped."),
    ("mfu", "Model FLOPs utilisation", "linear", "FLOPs a second over what the devices can do."),
    ("hfu", "Hardware FLOPs utilisation", "linear", "As MFU, but counts activations that are computed twice."),
)


def number(runs: list[Run], name: str, title: str, axis: str, note: str) -> Figure | None:
    """One number of the records over the steps."""
    data = []
    for run, colour in zip(runs, cycle(runs), strict=True):
        steps, values = run.series(name)
        if values:
            data.append(line(steps, values, run.name, colour, showlegend=len(runs) > 1, mode=mode(values)))
    scale: Row = {"tickformat": ".2~%", "rangemode": "tozero"} if name in ("mfu", "hfu") else {}
    if axis == "log":
        scale = log_axis([value for trace in data for value in trace["y"]])
    return chart(name, title, data, note=note, xaxis={"title": {"text": "step"}}, yaxis=scale)


def layers(run: Run) -> Figure | None:
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
    return chart("layers", "Gradient norm by layer", [heat], note="Before clipping; logarithmic.", wide=True,
                 xaxis={"title": {"text": "step"}}, yaxis={"autorange": "reversed"})  # fmt: skip


# ---- how fast ----


def throughput(runs: list[Run]) -> Figure | None:
    tokens = all(run.last("tokens_per_second") for run in runs)
    data = []
    for run, colour in zip(runs, cycle(runs), strict=True):
        rows = [row for row in run.rows if row.get("step_seconds")]
        value: Callable[[Row], float | None] = _tokens if tokens else _samples
        values = [value(row) for row in rows]
        data.append(line([r["step"] for r in rows], values, run.name, colour, showlegend=len(runs) > 1))
    unit = "tokens a second" if tokens else "samples a second"
    return chart("throughput", "Throughput", data, note=f"{unit.capitalize()}, over all ranks.",
                 xaxis={"title": {"text": "step"}}, yaxis={"rangemode": "tozero"})  # fmt: skip


def _tokens(row: Row) -> float | None:
    return row.get("tokens_per_second")


def _samples(row: Row) -> float | None:
    return float(row.get("samples") or 0) / float(row["step_seconds"])


def phases(runs: list[Run]) -> Figure | None:
    """One run: milliseconds of a step over the steps, stacked. Several: a bar each."""
    if len(runs) > 1:
        return _phase_bars(runs)
    rows = runs[0].gathered
    keep = [rows[i] for i in thinned([row["loss"] for row in rows], 600)]
    factor, sign, unit = moments(max((row.get("step_seconds") or 0.0 for row in rows), default=0.0))
    data = [
        {
            "type": "scatter", "mode": "lines", "stackgroup": "step", "name": times.NAMES[phase],
            "x": [row["step"] for row in keep], "y": [short(times.of(row, phase) * factor) for row in keep],
            "line": {"width": 0.5, "color": _PHASE_COLOURS[phase]}, "fillcolor": _PHASE_COLOURS[phase],
            "hovertemplate": f"%{{y:.3g}}{sign}",
        }
        for phase in times.STEP_PHASES if any(times.of(row, phase) for row in rows)
    ]  # fmt: skip
    return chart("phases", "Time per phase", data if len(rows) > 1 else [],
                 note=f"{unit} of a step, of the rank in the middle.", xaxis={"title": {"text": "step"}},
                 yaxis={"rangemode": "tozero", "ticksuffix": sign})  # fmt: skip


def _phase_bars(runs: list[Run]) -> Figure:
    seconds = [(run, times.step_shares(run), times.typical_step(run)) for run in runs]
    known = [(run.name, {p: s * step for p, s in shares.items()}) for run, shares, step in seconds if shares]
    data = [
        {"type": "bar", "orientation": "h", "name": times.NAMES[phase], "y": [name for name, _ in known],
         "x": [short(values[phase] * 1e3) for _, values in known], "marker": {"color": _PHASE_COLOURS[phase]},
         "hovertemplate": "%{x:.3g} ms"}
        for phase in times.STEP_PHASES if any(values[phase] for _, values in known)
    ]  # fmt: skip
    return chart("phases", "Time per phase", data, note="Milliseconds of a typical step, of the rank in the middle.",
                 barmode="stack", xaxis={"ticksuffix": " ms"}, yaxis={"autorange": "reversed"})  # fmt: skip


def whole_time(runs: list[Run]) -> Figure | None:
    """Where the wall time went: one bar a run."""
    known = [(run.name, times.totals(run)) for run in runs if run.gathered]
    data = [
        {"type": "bar", "orientation": "h", "name": times.NAMES[phase], "y": [name for name, _ in known],
         "x": [short(seconds.get(phase, 0.0)) for _, seconds in known], "marker": {"color": _PHASE_COLOURS[phase]},
         "hovertemplate": "%{x:.4g} s"}
        for phase in (*times.STEP_PHASES, *times.PAUSES, "outside")
        if any(seconds.get(phase) for _, seconds in known)
    ]  # fmt: skip
    return chart("time", "Where the time went", data, note="Seconds of the whole run.", barmode="stack",
                 xaxis={"ticksuffix": " s"}, yaxis={"visible": len(runs) > 1, "autorange": "reversed"},
                 short=len(runs) < 3)  # fmt: skip


# ---- ranks ----


def ranks(run: Run) -> Figure | None:
    """Each rank's own time over the median: a heat map, so that a slow rank is a stripe."""
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
                 note="A rank's own time in a step, without waiting, over that of the rank in the middle.",
                 xaxis={"title": {"text": "step"}}, yaxis={"autorange": "reversed"})  # fmt: skip


def own_time(run: Run) -> Figure | None:
    """Least and most over ranks of the phases that differ."""
    rows = run.gathered
    if not rows or not any(row.get("own_seconds") for row in rows):
        return None
    data = []
    factor, sign, unit = moments(max(times.of(row, "forward_backward", 2) for row in rows))
    for phase in ("data", "forward_backward", "communication"):
        if any(times.of(row, phase, 2) for row in rows):
            steps = [row["step"] for row in rows]
            most, middle = ([times.of(row, phase, place) * factor for row in rows] for place in (2, 1))
            data.append(line(steps, most, f"{times.NAMES[phase]}, most", _PHASE_COLOURS[phase]))
            data.append(line(steps, middle, "median", _PHASE_COLOURS[phase], width=1, line={"dash": "dot"},
                             showlegend=False))  # fmt: skip
    return chart("spread", "Slowest rank and median", data, note=f"{unit} of a step; dotted: the median.",
                 xaxis={"title": {"text": "step"}}, yaxis={"rangemode": "tozero", "ticksuffix": sign})  # fmt: skip


def memory(run: Run) -> Figure | None:
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
                 + (" Dotted: what the GPU has." if shapes else ""), shapes=shapes, xaxis={"title": {"text": "step"}},
                 yaxis={"rangemode": "tozero", "ticksuffix": " GiB"})  # fmt: skip


# ---- what happened ----

_KINDS = {
    "start": ("@c1", "circle"), "resume": ("@c2", "diamond"), "save": ("@c3", "square"), "stop": ("@c1", "x"),
    "restart": ("@c4", "triangle-up"), "fault": ("@c4", "star"), "straggler": ("@c6", "triangle-down"),
    "profile": ("@c5", "pentagon"),
}  # fmt: skip
_NOT_DRAWN = ("save_stall", "prometheus")


def timeline(runs: list[Run]) -> Figure | None:
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
