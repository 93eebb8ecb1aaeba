"""Shows what every rank of a running run does, again each second: `lockstep top RUN`.

Does not import torch.

It reads the run directory: events, the end of `metrics.jsonl`, and `ranks.json`, into which rank 0
writes the measurements of all ranks about once a second.

Tests: tests/monitor/test_ranks.py, tests/report/test_hostile.py
"""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.machine.output import is_terminal
from lockstep.report import units
from lockstep.report.read import PHASE_NAMES, STEP_PHASES, Row, read_events, status_of
from lockstep.report.shapes import STEP, fitting_row, moment_of, number, step_of
from lockstep.run_directory.records import RunDirectory, last_lines
from lockstep.run_directory.run_files import printable

_LAST_ROWS = 50  # of metrics.jsonl
_SECONDS = 1.0


def _lines_of(path: Path) -> tuple[str, list[str]]:
    """Return a run's status.

    And lines on what it does as a whole, and a table with a line for each rank.
    """
    run = RunDirectory(path)
    now = time.time()
    if not (run.events.exists() or run.metrics.exists()):
        text = f"{path} is not a run directory, or nothing has run in it"
        raise UsageError(text, fix="give the folder that `lockstep train --output-dir` writes")
    left_out: list[str] = []
    events = read_events(path, left_out.append)
    metrics = (
        row
        for row in last_lines(run.metrics, _LAST_ROWS)
        if "loss" in row and step_of(row) is not None
    )
    rows = [fitting_row(row, STEP) | {"time": moment_of(row)} for row in metrics]
    start: Row = next((event for event in reversed(events) if event.get("kind") == "start"), {})
    row = rows[-1] if rows else {}
    total = start.get("total_steps")
    signs = [event["time"] for event in events[-1:]] + [
        row["time"] for row in rows[-1:] if row.get("time")
    ]
    status = status_of(rows, events, now, is_run=run.config.exists())
    parts = [path.resolve().name, status, start.get("layout", "")]
    parts.append(f"step {row.get('step', 0):,}{f'/{total:,}' if total else ''}")
    if isinstance(row.get("loss"), int | float):
        parts.append(f"loss {row['loss']:.4f}")
    rate, unit = (
        (row.get("tokens_per_second"), "tokens") if row.get("tokens_per_second") else (0, "samples")
    )
    if rate or row.get("samples_per_second"):
        parts.append(f"{units.count(rate or row['samples_per_second'])} {unit}/s")
    if status == "running" and row.get("step_seconds") and total:
        parts.append(f"{units.seconds((total - row['step']) * row['step_seconds'])} left")
    parts.append(f"last sign {units.seconds(max(0.0, now - max(signs, default=now)))} ago")
    table = units.columns(_table(start.get("ranks") or [], _measured(run)))
    notes = [f"left out: {text}" for text in left_out]
    lines = ["  ".join(part for part in parts if part), "", *table, *notes]
    return status, [printable(line.replace("\n", " ")) for line in lines]


def _measured(run: RunDirectory) -> dict[str, list[float | None]]:
    """Return the columns of `ranks.json`: name → a value, or None, for each rank."""
    columns = (
        (name, column) for name, column in run.read_ranks().items() if isinstance(column, list)
    )
    return {name: [number(value) for value in column] for name, column in columns}


def _table(ranks: Sequence[Row], table: Mapping[str, Sequence[float | None]]) -> list[list[str]]:
    """Return the head and a row for each rank: shares of its step, and its memory."""
    phases = [phase for phase in STEP_PHASES if any(table.get(phase) or [])]
    head = [
        "rank",
        "host",
        "device",
        "step",
        *(PHASE_NAMES[phase] for phase in phases),
        "memory",
        "GPU",
    ]
    rows = [head]
    for position, rank in enumerate(ranks):
        seen = {name: values[position] for name, values in table.items() if position < len(values)}
        seconds = seen.get("step") or 0.0
        total = seen.get("total")
        used = seen.get("peak")
        busy = seen.get("gpu_utilisation")
        rows.append(
            [
                str(rank.get("rank", position)),
                str(rank.get("host", "")),
                str(rank.get("device", "")),
                units.seconds(seconds) if seconds else "–",
                *(_share(seen.get(phase), seconds) for phase in phases),
                f"{units.size(used)} of {units.size(total)}" if used and total else "–",
                "–" if busy is None else f"{busy:.0%}",
            ]
        )
    return rows


def _share(part: float | None, seconds: float) -> str:
    return f"{part / seconds:.0%}" if part is not None and seconds else "–"


def run(paths: Sequence[Path], *, once: bool) -> int:
    """Show run directories until the runs have ended or Ctrl+C; once without a terminal."""
    try:
        while True:
            described = [_lines_of(path) for path in paths]
            text = "\n\n".join("\n".join(lines) for _, lines in described)
            if once or not is_terminal(sys.stdout):
                print(text)
                return 0
            width, height = shutil.get_terminal_size()
            shown = [line[:width] for line in text.splitlines()]
            if len(shown) >= height:
                shown = [
                    *shown[: height - 2],
                    f"… {len(shown) - height + 2} more lines: make the terminal higher",
                ]
            # ECMA-48: to the top, and all of it empty
            sys.stdout.write("\x1b[H\x1b[2J" + "\n".join(shown) + "\n")
            sys.stdout.flush()
            if not any(status == "running" for status, _ in described):
                return 0
            time.sleep(_SECONDS)
    except KeyboardInterrupt:
        return 0
