"""A run directory as a `Run`: rows of metrics, events, the config, and what follows from them.

Reads what is there: a run that was killed has whole lines up to some step, and no last event.
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
_QUIET_SECONDS = 120.0  # a run that has written nothing for longer, and for many steps, is taken for dead
_QUIET_STEPS = 20


@dataclass
class Run:
    """What a run directory holds.

    Attributes:
        rows: logged steps, by step; numbers that are none (nan, inf) are None here.
        evaluations: by step.
        status: `done`, `preempted`, `running`, or `crashed` (it ended without saying so).
    """

    path: Path
    name: str
    rows: list[Row]
    evaluations: list[Row]
    events: list[Row]
    config_text: str
    status: str
    profile: Row | None = None
    not_numbers: list[int] = field(default_factory=list)  # steps whose loss was nan or infinite

    @property
    def start(self) -> Row:
        """The newest start event; empty where there is none."""
        return next((event for event in reversed(self.events) if event.get("kind") == "start"), {})

    @property
    def gathered(self) -> list[Row]:
        """The rows that hold figures over ranks."""
        return [row for row in self.rows if "phases" in row]

    def of_kind(self, *kinds: str) -> list[Row]:
        """Events of these kinds."""
        return [event for event in self.events if event.get("kind") in kinds]

    def series(self, name: str) -> tuple[list[int], list[float | None]]:
        """Steps and values of one number, where it was recorded."""
        found = [(row["step"], row[name]) for row in self.rows if name in row]
        return [step for step, _ in found], [value for _, value in found]

    def last(self, name: str) -> Any:
        """The newest recorded value."""
        return next((row[name] for row in reversed(self.rows) if row.get(name) is not None), None)


def read_run(path: Path, now: float | None = None) -> Run:
    """Read what there is.

    Args:
        now: seconds since the Unix epoch; another time for tests.

    Raises:
        UsageError: it is no run directory.
    """
    run = RunDirectory(path)
    if not path.is_dir() or not (run.metrics.exists() or run.events.exists() or run.config.exists()):
        raise UsageError(
            f"{path} is no run directory",
            why="it holds no metrics.jsonl, no events.jsonl and no config.yaml" if path.is_dir() else "there is none",
            fix="give the folder that `lockstep train --output-dir` wrote, for example runs/NAME",
        )
    everything = [row for row in run.read_metrics() if isinstance(row.get("step"), int)]
    bad = [row["step"] for row in everything if isinstance(row.get("loss"), str)]
    rows = _by_step([_numbers(row) for row in everything if "loss" in row])
    evaluations = _by_step([_numbers(row) for row in everything if "loss" not in row])
    events = [event for event in run.read_events() if isinstance(event.get("time"), (int, float))]
    return Run(
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
    """`section.key` → value; empty where the text is no YAML mapping."""
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
    """Without what is no number where one belongs: `"nan"`, `"inf"`."""
    return {key: None if isinstance(value, str) else _finite(value) for key, value in row.items()}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _by_step(rows: list[Row]) -> list[Row]:
    """Each step once, the newest line of it, in order."""
    return [row for _, row in sorted({row["step"]: row for row in rows}.items())]


def _status(rows: list[Row], events: list[Row], now: float) -> str:
    newest = events[-1] if events else {}
    if newest.get("kind") == "stop":
        return "preempted" if newest.get("reason") == "preempted" else "done"
    heard = max([event["time"] for event in events] + [row.get("time") or 0.0 for row in rows], default=0.0)
    usual = max([row.get("step_seconds") or 0.0 for row in rows[-_QUIET_STEPS:]], default=0.0)
    gap = rows[-1]["step"] - rows[-2]["step"] if len(rows) > 1 else 1
    return "running" if now - heard < max(_QUIET_SECONDS, _QUIET_STEPS * usual * gap) else "crashed"


def _profile(path: Path) -> Row | None:
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return loaded if isinstance(loaded, dict) else None
