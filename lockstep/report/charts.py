"""Makes the figures of a page from what runs recorded: plain data, which `draw.js` draws.

A figure is {id, title, note, wide, x, y, marks, rulers}:

x, y     an axis: `title`; `unit`, written after each number; `percent`; `log`; `zero`: it begins
         there; `range`; `ticks`; or `names`, one for each row of bars, dots or cells
marks    {kind, name, colour, x, y}, of five kinds: `line` (`width`, `dash`, `faint`, `step`: each
         value holds until the next), `area` (stacked), `bar` (stacked; `x` has a length for each
         row), `dots` (`text`, `symbol`), and `heat` (`z` has the values of each row; `log`, `low`,
         `high`, `unit`). Marks of one name share an entry of the legend; `label` is what the
         pointer shows in place of the name, nothing if empty
rulers   lines across the figure, at `x` or `y`

A colour is the name of a variable of `page.css`, so that it follows the light and the dark theme.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

from lockstep.division import ceil_div
from lockstep.errors import first_line
from lockstep.report import read
from lockstep.report.read import (
    PAUSES,
    PHASE_NAMES,
    STEP_PHASES,
    Row,
    RunData,
    phase_seconds,
    smoothed,
    thinned,
)

Figure = dict[str, Any]
COLOURS = ("c1", "c2", "c3", "c4", "c5", "c6")
GIB = 2**30
MIB = 2**20
POINTS = 24_000  # of all lines of a page, about 360 kB
CELLS = 6_000  # of a heat map
ROWS = 64
COLUMNS = 240
EVENTS = 200  # of a kind
OWN_CHARTS = 60
LINES_AT_MOST = 24  # runs in a chart
_PHASE_COLOURS = {
    "forward_backward": "c1",
    "data": "c2",
    "communication": "c4",
    "optimizer": "c3",
    "evaluation": "c5",
    "checkpoint": "c6",
    "other": "c7",
    "outside": "c8",
}


def charts(runs: list[RunData]) -> list[Figure]:
    """Return all figures that can be drawn of these runs, in the page's order."""
    drawings: list[tuple[str, Callable[[], Sequence[Figure | None]]]] = [
        ("loss", lambda: [_loss(runs), *(loss_against(runs)[1:] if len(runs) > 1 else [])]),
        ("throughput", lambda: [_throughput(runs)]),
        ("phases", lambda: [_phases(runs), _total_time(runs)]),
    ]
    if len(runs) == 1:
        of_one = {"ranks": _ranks, "spread": _own_time, "memory": _memory}
        drawings += [(name, partial(_as_list, draw, runs[0])) for name, draw in of_one.items()]
    drawings += [("own metrics", lambda: _own_metrics(runs))]
    drawings += [(args[0], partial(_as_list, _number, runs, *args)) for args in _NUMBERS]
    if len(runs) == 1:
        of_one = {"profile": _profile_shares, "profile-memory": _profile_memory, "layers": _layers}
        drawings += [(name, partial(_as_list, draw, runs[0])) for name, draw in of_one.items()]
    drawings += [("timeline", lambda: [_timeline(runs)])]
    marks = [
        figure
        for name, draw in drawings
        for figure in read.attempted(f"the figure “{name}”", draw, runs[0].left_out.append) or ()
    ]
    return [figure for figure in marks if figure and figure["marks"]]


def _as_list(draw: Callable[..., Figure | None], *args: Any) -> list[Figure | None]:
    """Return the only figure of a drawing, as those that draw several return theirs."""
    return [draw(*args)]


def _throughput(runs: list[RunData]) -> Figure:
    unit = "tokens" if all(run.last("tokens_per_second") for run in runs) else "samples"
    note = f"{unit.capitalize()} per second, over all ranks."
    rate = _number(runs, f"{unit}_per_second", "Throughput", {"zero": True, "unit": "/s"}, note)
    return rate | {"id": "throughput"}


def _loss(runs: list[RunData]) -> Figure:
    """Draw the losses of runs, smoothed where there are many, with evaluations and resumptions."""
    marks: list[Row] = []
    several = len(runs) > 1
    for run, colour in coloured(runs):
        steps, values = run.series("loss")
        name = run.name if several else "training"
        if len(values) > 40:
            marks.append(line(steps, values, name, colour, label="", faint=True, width=1))
            values = smoothed(values, max(5.0, len(values) / 50))
        if values:
            marks.append(line(steps, values, name, colour))
        evaluated = run.series("eval_loss", "evaluations")
        if evaluated[0]:
            name, colour = (f"{run.name}, evaluation", colour) if several else ("evaluation", "c2")
            marks.append(line(*evaluated, name, colour, width=1.5, dash="dot"))
    resumptions = [event for run in runs for event in run.of_kind("resume")]
    steps_resumed = {event["step"] for event in resumptions if isinstance(event.get("step"), int)}
    resumed = [{"x": step} for step in sorted(steps_resumed)]
    note = "Mean over the valid targets of a step."
    note += (
        " Thin: each logged step; thick: the moving mean."
        if any(len(run.rows) > 40 for run in runs)
        else ""
    )
    note += " Dashed lines: the run was resumed from a checkpoint." if resumed else ""
    log = _is_wide_range(value for mark in marks if "faint" not in mark for value in mark["y"])
    return chart(
        "loss", "Loss", marks, note=note, wide=True, rulers=resumed[-EVENTS:], y={"log": log}
    )


def loss_against(runs: list[RunData], note: str = "") -> list[Figure]:
    """Draw the loss of several runs against steps, tokens (or samples) and seconds."""
    shown = runs[:LINES_AT_MOST]
    unit = "tokens" if all(run.last("tokens_per_second") for run in shown) else "samples"
    figures = []
    for name, of_run in (
        ("steps", lambda run: [row["step"] for row in run.rows]),
        (unit, lambda run: _summed(run, unit)),
        ("seconds", _seconds),
    ):
        marks = []
        for index, (run, colour) in enumerate(coloured(shown)):
            rows = zip(of_run(run), run.rows, strict=True)
            known = [(x, row["loss"]) for x, row in rows if row.get("loss") is not None]
            smooth = smoothed([value for _, value in known], max(1.0, len(known) / 50))
            dash = ("", "dash", "dot")[index // len(COLOURS) % 3]
            marks.append(line([x for x, _ in known], smooth, run.name, colour, dash=dash))
        log = _is_wide_range(value for mark in marks for value in mark["y"])
        figures.append(
            chart(
                f"loss-{name}",
                f"Loss against {name}",
                marks,
                note=note,
                wide=name == "steps",
                x={"title": name},
                y={"log": log},
            )
        )
    return figures


def _summed(run: RunData, name: str) -> list[float]:
    """Return the tokens or samples up to each row.

    A row stands for the steps since the one before.
    """
    steps = [0, *(row["step"] for row in run.rows)]
    each = [
        (row.get(name) or 0.0) * (after - before)
        for row, before, after in zip(run.rows, steps, steps[1:], strict=False)
    ]
    return list(accumulate(each))


def _seconds(run: RunData) -> list[float]:
    """Return the seconds from the first sign of the run to each row."""
    times = [row.get("time") or 0.0 for row in run.rows]
    begun = min(
        [event["time"] for event in run.events] + [time for time in times if time], default=0.0
    )
    return [max(0.0, time - begun) for time in times]


_RATE = {"zero": True, "percent": True}
_NUMBERS: tuple[tuple[str, str, Row, str], ...] = (
    ("lr", "Learning rate", {}, "Of the first group of parameters."),
    (
        "grad_norm",
        "Gradient norm",
        {"log": True},
        "2-norm before clipping, over all shards and stages.",
    ),
    ("loss_scale", "Loss scale", {"log": True}, "For fp16; it is halved when a step is skipped."),
    ("mfu", "Model FLOPs utilisation", _RATE, "FLOPs per second, as a share of the devices' peak."),
    (
        "hfu",
        "Hardware FLOPs utilisation",
        _RATE,
        "Like MFU, but recomputed activations count twice.",
    ),
)


def _number(
    runs: list[RunData], name: str, title: str, axis: Row, note: str, of: str = "rows"
) -> Figure:
    series = [(run.series(name, of), run.name, colour) for run, colour in coloured(runs)]
    marks = [line(*points, label, colour) for points, label, colour in series if points[0]]
    return chart(name, title, marks, note=note, y=axis)


def _own_metrics(runs: list[RunData]) -> list[Figure]:
    rows = [row for run in runs for row in run.evaluations]
    keys = {
        key: None for row in rows for key, value in row.items() if isinstance(value, float | int)
    }
    names = [name for name in keys if name not in ("step", "time", "eval_loss")]
    shown = enumerate(names[:OWN_CHARTS])
    drawn = [
        _number(runs, name, name, {}, "", "evaluations") | {"id": f"own-{i}"} for i, name in shown
    ]
    if len(names) > OWN_CHARTS:
        drawn[-1]["note"] = f"{len(names) - OWN_CHARTS} more metrics are in metrics.jsonl."
    return drawn


def _layers(run: RunData) -> Figure | None:
    rows = [row for row in run.rows if row.get("gradient_norms")]
    if not rows:
        return None
    names = list(rows[-1]["gradient_norms"])
    shown = names[:ROWS]
    groups = _columns(rows, len(shown))
    cells = _heat(groups, lambda row: [row["gradient_norms"].get(name) for name in shown], log=True)
    note = f"2-norm before clipping; logarithmic.{_rows_per_column(groups)}"
    note += f" The first {ROWS} of {len(names)} layers." if len(names) > ROWS else ""
    return chart(
        "layers", "Gradient norm by layer", [cells], note=note, wide=True, y={"names": shown}
    )


def _bars(names: Sequence[str], parts: Iterable[tuple[str, str, list[float]]]) -> list[Row]:
    """Return stacked bars, one for each of `names`.

    Parts are (name, colour, a length for each bar).
    """
    return [
        {"kind": "bar", "name": name, "colour": colour, "x": [_short(value) for value in values]}
        for name, colour, values in parts
        if names and any(values)
    ]


def _phases(runs: list[RunData]) -> Figure:
    if len(runs) > 1:
        known = [
            (run, read.step_shares(run), read.typical_step(run) * 1e3)
            for run in runs
            if read.step_shares(run)
        ]
        parts = [
            (
                PHASE_NAMES[phase],
                _PHASE_COLOURS[phase],
                [shares[phase] * step for _, shares, step in known],
            )
            for phase in STEP_PHASES
        ]
        names = [run.name for run, _, _ in known]
        return chart(
            "phases",
            "Time per phase",
            _bars(names, parts),
            x={"unit": " ms"},
            y={"names": names},
            note="Milliseconds of a typical step, of the median rank.",
        )
    rows = runs[0].gathered
    keep = [rows[i] for i in thinned([row.get("step_seconds") for row in rows], POINTS // 60)]
    factor, sign, unit = _moments(
        max((row.get("step_seconds") or 0.0 for row in rows), default=0.0)
    )
    marks = [
        {
            "kind": "area",
            "name": PHASE_NAMES[phase],
            "colour": _PHASE_COLOURS[phase],
            "x": [row["step"] for row in keep],
            "y": [_short(phase_seconds(row, phase) * factor) for row in keep],
        }
        for phase in STEP_PHASES
        if len(rows) > 1 and any(phase_seconds(row, phase) for row in rows)
    ]
    return chart(
        "phases",
        "Time per phase",
        marks,
        note=f"{unit} per step, of the median rank.",
        y={"unit": sign},
    )


def _total_time(runs: list[RunData]) -> Figure:
    known = [(run.name, read.phase_totals(run)) for run in runs if run.gathered]
    factor, sign, unit = _moments(max((sum(seconds.values()) for _, seconds in known), default=0.0))
    parts = [
        (
            PHASE_NAMES[phase],
            _PHASE_COLOURS[phase],
            [seconds.get(phase, 0.0) * factor for _, seconds in known],
        )
        for phase in (*STEP_PHASES, *PAUSES, "outside")
    ]
    names = [name if len(runs) > 1 else "" for name, _ in known]
    return chart(
        "time",
        "Where the time went",
        _bars(names, parts),
        note=f"{unit} of the whole run.",
        x={"unit": sign},
        y={"names": names},
    )


def _ranks(run: RunData) -> Figure | None:
    """Draw how much longer than the median each rank's own work took, step by step."""
    rows = [row for row in run.gathered if row.get("own_seconds")]
    if not rows:
        return None
    count = max(len(row["own_seconds"]) for row in rows)
    shown = list(range(count))
    if count > ROWS:
        longest = [0.0] * count
        for row in rows:
            for rank, seconds in enumerate(row["own_seconds"]):
                longest[rank] = max(longest[rank], seconds)
        shown = sorted(sorted(shown, key=lambda rank: -longest[rank])[:ROWS])

    def skew(row: Row) -> list[float | None]:
        own = row["own_seconds"]
        middle = sorted(own)[(len(own) - 1) // 2] or 1.0
        return [own[rank] / middle if rank < len(own) else None for rank in shown]

    groups = _columns(rows, len(shown))
    cells = _heat(groups, skew, low=1.0, unit=" ×")
    known = [value for values in cells["z"] for value in values if value is not None]
    cells["high"] = max(1.3, *known)
    note = (
        "A rank's own time in a step, without waiting, over that of the median"
        f" rank.{_rows_per_column(groups)}"
    )
    note += f" The {ROWS} of {count} ranks that were slowest." if count > ROWS else ""
    return chart(
        "ranks",
        "Skew of the ranks",
        [cells],
        note=note,
        wide=len(shown) > 8,
        y={"names": [f"rank {rank}" for rank in shown]},
    )


def _own_time(run: RunData) -> Figure | None:
    """Draw the time of each phase on the slowest rank and on the median one."""
    rows = run.gathered
    if not any(row.get("own_seconds") for row in rows):
        return None
    marks = []
    factor, sign, unit = _moments(max(phase_seconds(row, "forward_backward", 2) for row in rows))
    steps = [row["step"] for row in rows]
    for phase in ("data", "forward_backward", "communication"):
        most, middle = (
            [phase_seconds(row, phase, column) * factor for row in rows] for column in (2, 1)
        )
        if any(most):
            name = PHASE_NAMES[phase]
            colour = _PHASE_COLOURS[phase]
            marks.append(line(steps, most, name, colour, label=f"{name}, most"))
            marks.append(
                line(steps, middle, name, colour, label=f"{name}, median", width=1, dash="dot")
            )
    return chart(
        "spread",
        "Slowest rank and median",
        marks,
        note=f"{unit} per step; dotted: the median.",
        y={"zero": True, "unit": sign},
    )


def _memory(run: RunData) -> Figure:
    """Draw the memory of the rank that holds most."""
    rows = [row for row in run.gathered if row.get("memory")]
    names = {
        "peak": "peak",
        "reserved": "reserved",
        "allocated": "allocated",
        "host": "host, resident",
    }
    marks = []
    colours = iter(COLOURS)
    for name, label in names.items():
        points = [
            (row["step"], row["memory"][name][2] / GIB) for row in rows if name in row["memory"]
        ]
        if points:
            marks.append(
                line(
                    [step for step, _ in points],
                    [value for _, value in points],
                    label,
                    next(colours),
                )
            )
    last = rows[-1]["memory"] if rows else {}
    total = last["total"][2] / GIB if "total" in last else 0.0
    is_near = "reserved" in last and last["reserved"][2] / GIB > 0.3 * total
    note = "GiB of the rank that holds most." + (" Dashed: the GPU's memory." if is_near else "")
    rulers = [{"y": total}] if is_near else []
    return chart(
        "memory", "Memory", marks, note=note, rulers=rulers, y={"zero": True, "unit": " GiB"}
    )


_KINDS = {
    "start": ("c1", "circle"),
    "resume": ("c2", "diamond"),
    "save": ("c3", "square"),
    "stop": ("c1", "cross"),
    "restart": ("c4", "triangle"),
    "recovery": ("c4", "diamond"),
    "recovered": ("c2", "triangle"),
    "fault": ("c4", "star"),
    "straggler": ("c6", "triangle"),
    "profile": ("c5", "diamond"),
}
_NOT_DRAWN = ("save_stall", "memory_copy", "lost_steps", "prometheus")


def _timeline(runs: list[RunData]) -> Figure:
    """Draw the events of runs over time: a row for each kind, or for each run."""
    several = len(runs) > 1
    begun = {id(run): min((event["time"] for event in run.events), default=0.0) for run in runs}
    longest = max(
        (run.events[-1]["time"] - begun[id(run)] for run in runs if run.events), default=0.0
    )
    factor, sign, unit = _moments(max(5.0, longest))
    kinds = [
        *dict.fromkeys(e["kind"] for run in runs for e in run.events if e["kind"] not in _NOT_DRAWN)
    ][:ROWS]
    marks = []
    left_out = 0
    for row, kind in enumerate(kinds):
        colour, symbol = _KINDS.get(kind, ("c4", "star"))
        points = [
            (index, run, event) for index, run in enumerate(runs) for event in run.of_kind(kind)
        ]
        every = ceil_div(len(points), EVENTS)
        left_out += len(points) - len(points[::every])
        points = points[::every]
        marks.append(
            {
                "kind": "dots",
                "name": kind if several else "",
                "colour": colour,
                "symbol": symbol,
                "x": [
                    _short((event["time"] - begun[id(run)]) * factor) for _, run, event in points
                ],
                "y": [index if several else row for index, _, _ in points],
                "text": [_about(event) for _, _, event in points],
            }
        )
    note = f"{unit} since the first start: checkpoints, faults, restarts."
    note += f" {left_out:,} of many events are left out." if left_out else ""
    return chart(
        "timeline",
        "Time line",
        marks,
        note=note,
        wide=True,
        x={"unit": sign},
        y={"names": [run.name for run in runs] if several else kinds},
    )


def _about(event: Row) -> str:
    parts = [str(event["kind"]), *([f"step {event['step']}"] if "step" in event else [])]
    parts += [
        first_line(event[key])[:120] for key in ("checkpoint", "reason", "text") if event.get(key)
    ]
    return ", ".join(parts)


_PARTS = {
    "compute": "c1",
    "overlapped communication": "c3",
    "exposed communication": "c4",
    "idle": "c8",
}


def _profile_shares(run: RunData) -> Figure:
    profile = run.profile or {}
    traced = (profile.get("ranks") or [])[:ROWS]
    names = [f"rank {rank['rank']}" for rank in traced]
    parts = [
        (part, colour, [rank["shares"].get(part, 0.0) for rank in traced])
        for part, colour in _PARTS.items()
    ]
    return chart(
        "profile",
        "Profile",
        _bars(names, parts),
        x={"percent": True, "range": [0, 1]},
        y={"names": names},
        note=f"{profile.get('about', '')} {profile.get('verdict', '')}".strip(),
    )


def _profile_memory(run: RunData) -> Figure:
    curve = (run.profile or {}).get("memory") or []
    factor, sign, _ = _moments(max((when for when, _ in curve), default=0.0))
    unit, name = (
        (GIB, " GiB") if max((size for _, size in curve), default=0.0) > GIB else (MIB, " MiB")
    )
    held = line(
        [when * factor for when, _ in curve],
        [size / unit for _, size in curve],
        "held",
        "c1",
        step=True,
    )
    return chart(
        "profile-memory",
        "Memory in the profile",
        [held] if curve else [],
        note="Allocated since the trace began, by the first traced rank.",
        x={"unit": sign},
        y={"unit": name},
    )


# ---- parts of figures ----


def chart(
    name: str, title: str, marks: list[Row], *, note: str = "", x: Row | None = None, **more: Any
) -> Figure:
    """Return a figure; its x axis has steps unless another one is given."""
    return {
        "id": name,
        "title": title,
        "note": note,
        "marks": marks,
        "x": {"title": "step"} if x is None else x,
        "y": {},
        "wide": False,
        **more,
    }


def line(x: Sequence[Any], y: Sequence[Any], name: str, colour: str, **more: Any) -> Row:
    """Return a line; `shortened` leaves as many of its points as a page can hold."""
    return {"kind": "line", "name": name, "colour": colour, "x": x, "y": y, **more}


def coloured(runs: Sequence[RunData]) -> list[tuple[RunData, str]]:
    """Return each run with a colour."""
    return [(run, COLOURS[i % len(COLOURS)]) for i, run in enumerate(runs)]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")  # enough for a picture


def _moments(longest: float) -> tuple[float, str, str]:
    if longest >= 600:
        return (1 / 3600, " h", "Hours") if longest >= 36_000 else (1 / 60, " min", "Minutes")
    return (1.0, " s", "Seconds") if longest >= 5 else (1e3, " ms", "Milliseconds")


def _is_wide_range(values: Iterable[float | None]) -> bool:
    """Return whether positive values differ so much that a logarithmic axis shows them better."""
    known = [value for value in values if value is not None]
    return bool(known) and min(known) > 0 and max(known) > 20 * min(known)


def shortened(figures: list[Figure]) -> int:
    """Thin the lines of figures in place, until they have `POINTS` at most.

    Return how many points a line may have; 0 if no line was thinned. Lines of wide figures may have
    twice as many as others. Short lines are left as they are.
    """
    lines = [
        (mark, 1 + figure["wide"])
        for figure in figures
        for mark in figure["marks"]
        if mark["kind"] == "line"
    ]
    most = read.LIMIT // 2
    while most > 4 and sum(min(len(mark["x"]), most * weight) for mark, weight in lines) > POINTS:
        most = most * 9 // 10
    is_thinner = False
    for mark, weight in lines:
        keep = thinned(mark["y"], most * weight)
        is_thinner = is_thinner or len(keep) < len(mark["x"])
        mark["x"] = [_short(mark["x"][i]) for i in keep]
        mark["y"] = [_short(mark["y"][i]) for i in keep]
    return most if is_thinner else 0


def _columns(rows: Sequence[Row], height: int) -> list[Sequence[Row]]:
    """Divide rows into the columns of a heat map that is `height` cells high."""
    count = min(len(rows), COLUMNS, max(1, CELLS // max(1, height)))
    return [rows[i * len(rows) // count : (i + 1) * len(rows) // count] for i in range(count)]


def _heat(
    groups: list[Sequence[Row]], values: Callable[[Row], Sequence[float | None]], **more: Any
) -> Row:
    """Return a heat map; a cell has the greatest value of its group of rows."""
    by_column = []
    for group in groups:
        known = [
            [value for value in cell if value is not None]
            for cell in zip(*map(values, group), strict=True)
        ]
        by_column.append([_short(max(cell)) if cell else None for cell in known])
    cells = [list(row) for row in zip(*by_column, strict=True)]
    return {
        "kind": "heat",
        "name": "",
        "x": [group[0]["step"] for group in groups],
        "z": cells,
        **more,
    }


def _rows_per_column(groups: list[Sequence[Row]]) -> str:
    most = max(len(group) for group in groups)
    return f" Each column is the greatest of {most:,} logged steps." if most > 1 else ""
