"""Reads a run directory into `RunData`: rows of metrics, events, the config, and what follows from them.

A run that was killed has whole lines up to some step, and no last event.
"""

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.records import RunDirectory

Row = dict[str, Any]
_QUIET_SECONDS = 120.0  # a run that has written nothing for longer, and for many steps, counts as crashed
_QUIET_STEPS = 20


@dataclass
class RunData:
    """The contents of a run directory.

    Attributes:
        path: the directory.
        name: its name.
        rows: logged steps, by step; nan and inf are None here.
        evaluations: by step.
        events: in the order of the file.
        config_text: the resolved config.
        status: `done`, `preempted`, `running`, or `crashed` (there is no last event).
        profile: the newest profile's summary.
        not_numbers: steps whose loss was nan or infinite.
    """

    path: Path
    name: str
    rows: list[Row]
    evaluations: list[Row]
    events: list[Row]
    config_text: str
    status: str
    profile: Row | None = None
    not_numbers: list[int] = field(default_factory=list)

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

    def series(self, name: str) -> tuple[list[int], list[float | None]]:
        """Return the steps and values of one number, where it was recorded."""
        found = [(row["step"], row[name]) for row in self.rows if name in row]
        return [step for step, _ in found], [value for _, value in found]

    def last(self, name: str) -> Any:
        """Return the newest recorded value."""
        return next((row[name] for row in reversed(self.rows) if row.get(name) is not None), None)


def read_run(path: Path, now: float | None = None) -> RunData:
    """Read a run directory.

    Args:
        path: the directory.
        now: seconds since the Unix epoch; set by tests.

    Raises:
        UsageError: it is not a run directory.
    """
    run = RunDirectory(path)
    if not path.is_dir() or not (run.metrics.exists() or run.events.exists() or run.config.exists()):
        raise UsageError(
            f"{path} is not a run directory",
            why="it has no metrics.jsonl, no events.jsonl and no config.yaml" if path.is_dir() else "it does not exist",
            fix="give the folder that `lockstep train --output-dir` wrote, for example runs/NAME",
        )
    everything = [row for row in run.read_metrics() if isinstance(row.get("step"), int)]
    bad = [row["step"] for row in everything if isinstance(row.get("loss"), str)]
    rows = _by_step([_numbers(row) for row in everything if "loss" in row])
    evaluations = _by_step([_numbers(row) for row in everything if "loss" not in row])
    events = [event for event in run.read_events() if isinstance(event.get("time"), (int, float))]
    return RunData(
        path=path,
        name=path.resolve().name,
        rows=rows,
        evaluations=evaluations,
        events=events,
        config_text=run.config.read_text(errors="replace") if run.config.exists() else "",
        status=_status(rows, events, time.time() if now is None else now),
        profile=_profile(path / "profile" / "summary.json"),
        not_numbers=bad,
    )


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
    """Replace texts where a number belongs (`"nan"`, `"inf"`) by None."""
    return {key: None if isinstance(value, str) else _finite(value) for key, value in row.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _by_step(rows: list[Row]) -> list[Row]:
    """Return the newest row of each step, in order."""
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]


def _status(rows: list[Row], events: list[Row], now: float) -> str:
    newest = events[-1] if events else {}
    if newest.get("kind") == "stop":
        return "preempted" if newest.get("reason") == "preempted" else "done"
    last_sign = max([event["time"] for event in events] + [row.get("time") or 0.0 for row in rows], default=0.0)
    usual = max([row.get("step_seconds") or 0.0 for row in rows[-_QUIET_STEPS:]], default=0.0)
    gap = rows[-1]["step"] - rows[-2]["step"] if len(rows) > 1 else 1
    return "running" if now - last_sign < max(_QUIET_SECONDS, _QUIET_STEPS * usual * gap) else "crashed"


def _profile(path: Path) -> Row | None:
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None
