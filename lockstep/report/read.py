"""Reads a run directory into `RunData`: rows of metrics, events, the config, and what follows from them.

A run that was killed has whole lines up to some step, and no last event.
"""

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.errors import UsageError
from lockstep.records import RunDirectory

Row = dict[str, Any]
_QUIET_SECONDS = 120.0  # a run that has written nothing for longer, and for many steps, counts as crashed
_QUIET_STEPS = 20


@dataclass
class RunData:
    """The contents of a run directory."""

    path: Path  # the directory
    name: str  # its name
    rows: list[Row]  # logged steps, by step; nan and inf are None here
    evaluations: list[Row]  # by step
    events: list[Row]  # in the order of the file
    config_text: str  # the resolved config
    status: str  # `done`, `preempted`, `running`, or `crashed` (there is no last event)
    profile: Row | None = None  # the newest profile's summary
    not_numbers: list[int] = field(default_factory=list)  # steps whose loss was nan or infinite
    media: dict[str, list[Row]] = field(default_factory=dict)  # by name of what was logged

    @property
    def start(self) -> Row:
        """The newest start event; empty if there is none."""
        return next((event for event in reversed(self.events) if event.get("kind") == "start"), {})

    @property
    def gathered(self) -> list[Row]:
        """The rows with figures over ranks."""
        return [row for row in self.rows if "phases" in row]

    def of_kind(self, *kinds: str) -> list[Row]:
        """Return the events of these kinds."""
        return [event for event in self.events if event.get("kind") in kinds]

    def series(self, name: str, of: str = "rows") -> tuple[list[int], list[float | None]]:
        """Return the steps and values of one number, where it was recorded; `of`: `rows` or `evaluations`."""
        found = [(row["step"], row[name]) for row in getattr(self, of) if name in row]
        return [step for step, _ in found], [value for _, value in found]

    def last(self, name: str) -> Any:
        """Return the newest recorded value."""
        return next((row[name] for row in reversed(self.rows) if row.get(name) is not None), None)


def is_run(path: Path) -> bool:
    """Return whether a path is a run directory."""
    run = RunDirectory(path)
    return path.is_dir() and (run.metrics.exists() or run.events.exists() or run.config.exists())


def read_run(path: Path, now: float | None = None) -> RunData:
    """Read a run directory. Raises UsageError: it is not a run directory."""
    run = RunDirectory(path)
    if not is_run(path):
        why = "it has no metrics.jsonl, no events.jsonl and no config.yaml" if path.is_dir() else "it does not exist"
        fix = "give the folder that `lockstep train --output-dir` wrote, for example runs/NAME"
        raise UsageError(f"{path} is not a run directory", why=why, fix=fix)
    everything = [row for row in run.read_metrics() if isinstance(row.get("step"), int)]
    rows = _by_step([_numbers(row) for row in everything if "loss" in row])
    evaluations = _by_step([_numbers(row) for row in everything if not {"loss", "media"} & set(row)])
    events = [event for event in run.read_events() if isinstance(event.get("time"), (int, float))]
    try:
        profile = json.loads((path / "profile" / "summary.json").read_text())
    except (OSError, ValueError):
        profile = None
    return RunData(
        path, path.resolve().name, rows, evaluations, events,
        config_text=run.config.read_text(errors="replace") if run.config.exists() else "",
        status=status_of(rows, events, time.time() if now is None else now, is_run=run.config.exists()),
        profile=profile if isinstance(profile, dict) else None,
        not_numbers=[row["step"] for row in everything if isinstance(row.get("loss"), str)], media=_media(everything),
    )  # fmt: skip


@lru_cache(maxsize=64)
def flat_config(text: str) -> dict[str, Any]:
    """Return `section.key` → value; empty if the text is not a YAML mapping."""
    import yaml

    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return dict(_flattened(loaded, "")) if isinstance(loaded, dict) else {}


def _flattened(value: Any, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        return [(prefix, value)]
    return [pair for key, inside in value.items() for pair in _flattened(inside, f"{prefix}.{key}".lstrip("."))]


def _numbers(row: Row) -> Row:
    """Replace numbers that are not finite, and texts where a number belongs (`"nan"`, `"inf"`), by None."""
    bad = [k for k, v in row.items() if isinstance(v, str) or (isinstance(v, float) and not math.isfinite(v))]
    return row | dict.fromkeys(bad)


def _by_step(rows: list[Row]) -> list[Row]:
    """Return a row for each step, in order, with the newest value of each name."""
    merged: dict[int, Row] = {}
    for row in rows:
        merged[row["step"]] = merged.get(row["step"], {}) | row
    return [row for _, row in sorted(merged.items())]


def _media(rows: list[Row]) -> dict[str, list[Row]]:
    """Return name → {step, kind, …}; of a step that was run again, the newest."""
    found: dict[str, dict[int, Row]] = {}
    for row in rows:
        for name, one in row["media"].items() if isinstance(row.get("media"), dict) else ():
            if isinstance(one, dict) and one.get("kind") in ("text", "image", "histogram"):
                found.setdefault(name, {})[row["step"]] = {"step": row["step"], **one}
    return {name: [one for _, one in sorted(by_step.items())] for name, by_step in found.items()}


def status_of(rows: list[Row], events: list[Row], now: float, *, is_run: bool) -> str:
    """Return `done`, `preempted`, `running` or `crashed`; of the rows the last ones are enough.

    `is_run`: it is one of `train`; else a loop of one's own that logs, whose end nobody writes down.
    """
    newest = events[-1] if events else {}
    if newest.get("kind") == "stop":
        return "preempted" if newest.get("reason") == "preempted" else "done"
    last_sign = max([event["time"] for event in events] + [row.get("time") or 0.0 for row in rows], default=0.0)
    usual = max([row.get("step_seconds") or 0.0 for row in rows[-_QUIET_STEPS:]], default=0.0)
    gap = rows[-1]["step"] - rows[-2]["step"] if len(rows) > 1 else 1
    if now - last_sign < max(_QUIET_SECONDS, _QUIET_STEPS * usual * gap):
        return "running"
    return "crashed" if is_run or events else "done"


STEP_PHASES = ("data", "forward_backward", "communication", "optimizer", "other")
PAUSES = ("evaluation", "checkpoint")
PHASE_NAMES = {
    "data": "waiting for data",
    "forward_backward": "forward and backward",
    "communication": "waiting for other ranks",
    "optimizer": "optimizer",
    "other": "other",
    "evaluation": "evaluation",
    "checkpoint": "checkpoints",
    "outside": "starts and gaps",
}


def phase_seconds(row: Row, phase: str, place: int = 1) -> float:
    """Return the seconds of a phase of a row: 0 least, 1 median, 2 most over ranks."""
    found: Any = row["phases"].get(phase)
    return float(found[place]) if found else 0.0


def after_warmup(rows: Sequence[Row]) -> list[Row]:
    """Leave out the first quarter, at least one row: steps that warm up do not represent the rest."""
    return list(rows[max(1, len(rows) // 4) :]) or list(rows)


def step_shares(run: RunData) -> dict[str, float]:
    """Return the share of each phase in a typical step, of the median rank; empty without measurements."""
    rows = after_warmup(run.gathered)
    typical = {phase: median([phase_seconds(row, phase) for row in rows]) for phase in STEP_PHASES} if rows else {}
    total = sum(typical.values())
    return {phase: value / total for phase, value in typical.items()} if total else {}


def typical_step(run: RunData) -> float:
    """Return the seconds of a step, the median over rows after the warm-up; 0 without measurements."""
    values = [row["step_seconds"] for row in after_warmup(run.rows) if row.get("step_seconds")]
    return float(median(values)) if values else 0.0


def wall_seconds(run: RunData) -> float:
    """Return the seconds between the first and the last sign of the run."""
    times = [event["time"] for event in run.events] + [row["time"] for row in run.rows if row.get("time")]
    return max(times) - min(times) if times else 0.0


def phase_totals(run: RunData) -> dict[str, float]:
    """Return the seconds of each phase over the whole run; time outside of all rows is `outside`."""
    sums = dict.fromkeys((*STEP_PHASES, *PAUSES), 0.0)
    before = 0
    restarts = [event["step"] for event in run.of_kind("resume") if isinstance(event.get("step"), int)]
    for row in run.gathered:
        begun = max([before, *(step for step in restarts if step < row["step"])])
        for phase in STEP_PHASES:
            sums[phase] += phase_seconds(row, phase) * (row["step"] - begun)
        for phase in PAUSES:
            sums[phase] += phase_seconds(row, phase, 2)
        before = row["step"]
    if not run.gathered:
        return {}
    sums["outside"] = max(0.0, wall_seconds(run) - sum(sums.values()))
    return sums


LIMIT = 1500  # points of a line


def thinned(values: Sequence[float | None], limit: int = LIMIT) -> list[int]:
    """Return the indices to keep: the least, the most and the first of each stretch, so that peaks stay."""
    count = len(values)
    if count <= limit:
        return list(range(count))
    stretches = limit // 3
    kept = {0, count - 1}
    for stretch in range(stretches):
        indices = range(stretch * count // stretches, (stretch + 1) * count // stretches)
        kept.add(indices[0])
        numbers = [i for i in indices if values[i] is not None]
        if numbers:
            kept |= {min(numbers, key=lambda i: values[i] or 0.0), max(numbers, key=lambda i: values[i] or 0.0)}
    return sorted(kept)


def smoothed(values: Sequence[float | None], span: float) -> list[float | None]:
    """Return a moving mean over about `span` values on either side, so that it does not lag."""
    forth = _exponential(values, span)
    back = _exponential(values[::-1], span)[::-1]
    return [None if a is None or b is None else (a + b) / 2 for a, b in zip(forth, back, strict=True)]


def _exponential(values: Sequence[float | None], span: float) -> list[float | None]:
    """Return the exponential mean of the earlier values, corrected for its start."""
    keep = 1 - 1 / max(1.0, span)
    mean, weight, result = 0.0, 0.0, list[float | None]()
    for value in values:
        if value is None:
            result.append(None)
            continue
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        result.append(mean / weight)
    return result
