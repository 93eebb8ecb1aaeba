"""Reads a run directory into `RunData`.

There are rows of metrics, events, the config, and what follows from them.

A run that was killed has whole lines up to some step, and no last event. The directory may be a
stranger's: what can't be what it should be is left out, and `left_out` says so. Files are read as
streams, and of a long run so many rows are kept as fit into a fixed memory (`thinning`).

Tests: tests/report/test_report.py, tests/report/test_hostile.py
"""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from lockstep.errors import UsageError
from lockstep.report.shapes import (
    EVENT,
    MEDIA,
    PROFILE,
    STEP,
    fitting,
    fitting_row,
    moment_of,
    step_of,
)
from lockstep.report.thinning import BUDGET, Thinner
from lockstep.run_directory import run_files
from lockstep.run_directory.records import RunDirectory
from lockstep.run_directory.run_files import Note, parse_object

Row = dict[str, Any]
_CONFIG_BYTES = 200_000
_LEAST_BYTES = 256 << 10  # of a run's rows, of however many runs
_PROFILE_BYTES = 16 << 20
_EVENT_BYTES = 8 << 20  # of lines of events; the newest are kept
_BAD_STEPS = 1_000
_MEDIA_NAMES = 1_000
_PEAKS = ("loss", "grad_norm", "step_seconds", "memory_bytes")
# a run that has written nothing for longer, and for many steps, counts as crashed
_QUIET_SECONDS = 120.0
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
    # steps whose loss was nan or infinite, the first ones
    not_numbers: list[int] = field(default_factory=list)
    # by name of what was logged, the first and the newest
    media: dict[str, list[Row]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)  # what could not be read, and why
    num_rows: int | None = None  # of steps in the file, where `rows` has only some of them
    totals: dict[str, float] | None = None  # seconds of each phase over all of those

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
        """Return the steps and values of one number, where it was recorded.

        `of`: `rows` or `evaluations`.
        """
        points = [(row["step"], row[name]) for row in getattr(self, of) if name in row]
        return [step for step, _ in points], [value for _, value in points]

    def last(self, name: str) -> Any:
        """Return the newest recorded value."""
        return next((row[name] for row in reversed(self.rows) if row.get(name) is not None), None)


def is_run(path: Path) -> bool:
    """Return whether a path is a run directory."""
    run = RunDirectory(path)
    return path.is_dir() and (run.metrics.exists() or run.events.exists() or run.config.exists())


def read_run(path: Path, now: float | None = None, *, among: int = 1) -> RunData:
    """Read a run directory, one `among` so many, which share the memory.

    Raises UsageError: it is not one.
    """
    run = RunDirectory(path)
    if not is_run(path):
        why = (
            "it has no metrics.jsonl, no events.jsonl and no config.yaml"
            if path.is_dir()
            else "it does not exist"
        )
        fix = "give the folder that `lockstep train --output-dir` wrote, for example runs/NAME"
        raise UsageError(f"{path} is not a run directory", why=why, fix=fix)
    left_out: list[str] = []
    events = read_events(path, left_out.append)
    metrics = _Metrics(_restarts(events), budget=max(BUDGET // among, _LEAST_BYTES))
    for line in run_files.read_lines(path, run.metrics.name, left_out.append):
        metrics.add(line)
    rows = [_row(row, STEP) for row in metrics.steps.rows()]
    evaluations = [_row(row, {}) for row in metrics.evaluations.rows()]
    try:
        config_text = run_files.read_text(path, run.config.name, limit=_CONFIG_BYTES)
    except OSError as error:
        config_text = ""
        _note_unless_missing(error, left_out.append)
    if (problem := _parsed_config(config_text)[1]) is not None:
        left_out.append(f"the keys of {run.config.name}: {problem}")
    is_thinner = metrics.steps.dropped > 0
    return RunData(
        path,
        path.resolve().name,
        rows,
        evaluations,
        events,
        config_text=config_text,
        status=status_of(
            rows, events, time.time() if now is None else now, is_run=run.config.exists()
        ),
        profile=_profile(path, left_out.append),
        not_numbers=metrics.not_numbers,
        media=metrics.media,
        left_out=left_out,
        num_rows=metrics.num_steps if is_thinner else None,
        totals=metrics.phases.sums if is_thinner else None,
    )


class _Metrics:
    """Collects the rows of metrics.jsonl, line by line, within a budget of memory."""

    def __init__(self, restarts: Sequence[int], budget: int) -> None:
        self.steps = Thinner(_PEAKS, budget)
        self.evaluations = Thinner(budget=budget)
        self.phases = PhaseSums(restarts)
        self.media: dict[str, list[Row]] = {}
        self.not_numbers: list[int] = []
        self.num_steps = 0

    def add(self, line: bytes) -> None:
        """Take in one line of `metrics.jsonl`; a line that is not a row of a step is left out."""
        row = parse_object(line)
        step = step_of(row) if row is not None else None
        if row is None or step is None:
            return
        if isinstance(row.get("media"), dict):
            self._add_media(step, row["media"])
        if "loss" in row:
            self.num_steps += 1
            if isinstance(row["loss"], str) and len(self.not_numbers) < _BAD_STEPS:
                self.not_numbers.append(step)
            if "phases" in row:
                self.phases.add(step, fitting(row["phases"], STEP["phases"], {}))
            self.steps.add(step, row, line)
        elif "media" not in row:
            self.evaluations.add(step, row, line)

    def _add_media(self, step: int, logged: Row) -> None:
        """Keep the first and the newest of each name; of a step that was run again, the newest."""
        for name, value in logged.items():
            medium = fitting(value, MEDIA, {})
            if medium.get("kind") not in ("text", "image", "histogram"):
                continue
            if name not in self.media and len(self.media) >= _MEDIA_NAMES:
                continue
            rows = self.media.setdefault(name, [])
            number = 1 + max((row["number"] for row in rows if row["step"] != step), default=0)
            rows[:] = [row for row in rows if row["step"] != step]
            rows.append({"step": step, **medium, "number": number})
            rows.sort(key=lambda row: int(row["step"]))
            del rows[1:-NEWEST]


NEWEST = 4  # of what was logged by one name: so many are shown, and for a histogram the first one


def _row(row: Row, known: dict[str, Any]) -> Row:
    kept = fitting_row(row, known)
    if "time" in kept and moment_of(row) is None:
        del kept["time"]
    return kept


def read_events(path: Path, note: Note = lambda _text: None) -> list[Row]:
    """Return the first event of a run directory and the newest ones, in the order of the file."""
    name = RunDirectory(path).events.name
    kept: deque[tuple[int, Row]] = deque()
    size = left = 0
    for line in run_files.read_lines(path, name, note):
        row = parse_object(line)
        if row is None or moment_of(row) is None or not isinstance(row.get("kind"), str):
            continue
        texts = {
            key: value[:_EVENT_CHARACTERS] for key, value in row.items() if isinstance(value, str)
        }
        kept.append(
            (len(line), _row(row, EVENT) | {k: v for k, v in texts.items() if k not in EVENT})
        )
        size += len(line)
        while size > _EVENT_BYTES and len(kept) > 2:
            size -= kept[1][0]
            del kept[1]
            left += 1
    if left:
        note(f"{left:,} earlier events of {name}")
    return [row for _, row in kept]


_EVENT_CHARACTERS = 10_000


def _restarts(events: Sequence[Row]) -> list[int]:
    steps = [step_of(event) for event in events if event["kind"] == "resume"]
    return sorted(step for step in steps if step is not None)


def _profile(path: Path, note: Note) -> Row | None:
    try:
        profile = run_files.read_object(path, "profile", "summary.json", limit=_PROFILE_BYTES)
    except OSError as error:
        _note_unless_missing(error, note)
        return None
    return dict(fitting(profile, PROFILE, {}))


def _note_unless_missing(error: OSError, note: Note) -> None:
    if not isinstance(error, FileNotFoundError):
        note(str(error))


def flat_config(text: str) -> dict[str, Any]:
    """Return `section.key` → value.

    Empty if the text is not a YAML mapping, or one that can't be read safely.
    """
    return _parsed_config(text)[0]


@lru_cache(maxsize=64)
def _parsed_config(text: str) -> tuple[dict[str, Any], str | None]:
    """Return `section.key` → value, and why it is empty although there is a text."""
    from lockstep.config.tree import Origin, parse

    try:
        loaded = parse(text, lambda line: Origin("config.yaml", line + 1)).plain()
    except UsageError as error:
        return {}, error.what
    return (dict(_flattened(loaded, "")) if isinstance(loaded, dict) else {}), None


def _flattened(value: Any, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping) or not value:
        return [(prefix, value)]
    return [
        pair
        for key, inside in value.items()
        for pair in _flattened(inside, f"{prefix}.{key}".lstrip("."))
    ]


def status_of(rows: list[Row], events: list[Row], now: float, *, is_run: bool) -> str:
    """Return `done`, `preempted`, `running` or `crashed`; of the rows the last ones are enough.

    `is_run`: it is one of `train`; else a loop of one's own that logs, whose end nobody writes
    down.
    """
    newest = events[-1] if events else {}
    if newest.get("kind") == "stop":
        return "preempted" if newest.get("reason") == "preempted" else "done"
    last_sign = max(
        [event["time"] for event in events] + [row.get("time") or 0.0 for row in rows], default=0.0
    )
    usual = max([row.get("step_seconds") or 0.0 for row in rows[-_QUIET_STEPS:]], default=0.0)
    gap = rows[-1]["step"] - rows[-2]["step"] if len(rows) > 1 else 1
    if now - last_sign < max(_QUIET_SECONDS, _QUIET_STEPS * usual * gap):
        return "running"
    return "crashed" if is_run or events else "done"


T = TypeVar("T")


def attempted(what: str, make: Callable[[], T], note: Note) -> T | None:
    """Return what is made of records.

    None, and a note, if numbers that nobody expects are in them.
    """
    try:
        return make()
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        note(f"{what}, since its records are odd ({type(error).__name__}: {error})")
        return None


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


def phase_seconds(row: Row, phase: str, column: int = 1) -> float:
    """Return the seconds of a phase of a row: 0 least, 1 median, 2 most over ranks."""
    seconds: Any = row["phases"].get(phase)
    return float(seconds[column]) if seconds else 0.0


def after_warmup(rows: Sequence[Row]) -> list[Row]:
    """Leave out the first quarter of the rows, at least one.

    Steps that warm up do not represent the rest.
    """
    return list(rows[max(1, len(rows) // 4) :]) or list(rows)


def step_shares(run: RunData) -> dict[str, float]:
    """Return the share of each phase in a typical step, of the median rank.

    Empty without measurements.
    """
    rows = after_warmup(run.gathered)
    typical = (
        {phase: median([phase_seconds(row, phase) for row in rows]) for phase in STEP_PHASES}
        if rows
        else {}
    )
    total = sum(typical.values())
    return {phase: value / total for phase, value in typical.items()} if total else {}


def typical_step(run: RunData) -> float:
    """Return the seconds of a step, the median over rows after the warm-up.

    0 without measurements.
    """
    return typical(run, "step_seconds")


def typical(run: RunData, name: str) -> float:
    """Return the median of a number over rows after the warm-up; 0 without measurements."""
    values = [row[name] for row in after_warmup(run.rows) if row.get(name)]
    return float(median(values)) if values else 0.0


def wall_seconds(run: RunData) -> float:
    """Return the seconds between the first and the last sign of the run."""
    times = [event["time"] for event in run.events] + [
        row["time"] for row in run.rows if row.get("time")
    ]
    return max(times) - min(times) if times else 0.0


class PhaseSums:
    """Adds up the seconds of each phase over a run's rows.

    A row stands for the steps since the one before.
    """

    def __init__(self, restarts: Sequence[int]) -> None:
        self.sums = dict.fromkeys((*STEP_PHASES, *PAUSES), 0.0)
        self._restarts = restarts  # sorted
        self._before = 0

    def add(self, step: int, phases: Mapping[str, Sequence[float]]) -> None:
        """Add the phases of a row, if it has any."""
        if not phases:
            return
        earlier = bisect_left(self._restarts, step)
        begun = max(self._before, self._restarts[earlier - 1] if earlier else 0)
        row = {"phases": phases}
        for phase in STEP_PHASES:
            self.sums[phase] += phase_seconds(row, phase) * max(0, step - begun)
        for phase in PAUSES:
            self.sums[phase] += phase_seconds(row, phase, 2)
        self._before = step


def phase_totals(run: RunData) -> dict[str, float]:
    """Return the seconds of each phase over the whole run.

    Time outside of all rows is `outside`.
    """
    if not run.gathered:
        return {}
    sums = run.totals
    if sums is None:
        adding = PhaseSums(_restarts(run.events))
        for row in run.gathered:
            adding.add(row["step"], row["phases"])
        sums = adding.sums
    return {**sums, "outside": max(0.0, wall_seconds(run) - sum(sums.values()))}


LIMIT = 1500  # points of a line


def thinned(values: Sequence[float | None], limit: int = LIMIT) -> list[int]:
    """Return the indices of the points to keep.

    They are the least, the greatest and the first of each stretch, so that peaks stay.
    """
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
            kept |= {
                min(numbers, key=lambda i: values[i] or 0.0),
                max(numbers, key=lambda i: values[i] or 0.0),
            }
    return sorted(kept)


def smoothed(values: Sequence[float | None], span: float) -> list[float | None]:
    """Return a moving mean over about `span` values on either side, so that it does not lag."""
    forth = _exponential(values, span)
    back = _exponential(values[::-1], span)[::-1]
    return [
        None if a is None or b is None else (a + b) / 2 for a, b in zip(forth, back, strict=True)
    ]


def _exponential(values: Sequence[float | None], span: float) -> list[float | None]:
    """Return the exponential mean of the earlier values, corrected for its start."""
    keep = 1 - 1 / max(1.0, span)
    mean = 0.0
    weight = 0.0
    result = list[float | None]()
    for value in values:
        if value is None:
            result.append(None)
            continue
        mean = keep * mean + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        result.append(mean / weight)
    return result
