"""Shows what every rank of a running run does, again each second: `lockstep top RUN`. Does not import torch.

It reads the run directory: events, the end of `metrics.jsonl`, and `ranks.json`, into which rank 0 writes the
measurements of all ranks about once a second.
"""

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.records import RunDirectory, last_lines
from lockstep.report import units
from lockstep.report.read import PHASE_NAMES, STEP_PHASES, Row, status_of

_LAST_ROWS = 50  # of metrics.jsonl
_SECONDS = 1.0


def _lines_of(path: Path) -> tuple[str, list[str]]:
    """Return a run's status; and lines on what it does as a whole, and a table with a line for each rank."""
    run, now = RunDirectory(path), time.time()
    if not (run.events.exists() or run.metrics.exists()):
        text = f"{path} is not a run directory, or nothing has run in it"
        raise UsageError(text, fix="give the folder that `lockstep train --output-dir` writes")
    events = [event for event in run.read_events() if isinstance(event.get("time"), int | float)]
    rows = [row for row in last_lines(run.metrics, _LAST_ROWS) if "loss" in row and isinstance(row.get("step"), int)]
    start: Row = next((event for event in reversed(events) if event.get("kind") == "start"), {})
    row, total = rows[-1] if rows else {}, start.get("total_steps")
    signs = [event["time"] for event in events[-1:]] + [row["time"] for row in rows[-1:] if row.get("time")]
    status = status_of(rows, events, now, is_run=run.config.exists())
    parts = [path.resolve().name, status, start.get("layout", "")]
    parts.append(f"step {row.get('step', 0):,}{f'/{total:,}' if total else ''}")
    if isinstance(row.get("loss"), int | float):
        parts.append(f"loss {row['loss']:.4f}")
    rate, unit = (row.get("tokens_per_second"), "tokens") if row.get("tokens_per_second") else (0, "samples")
    if rate or row.get("samples_per_second"):
        parts.append(f"{units.count(rate or row['samples_per_second'])} {unit}/s")
    if status == "running" and row.get("step_seconds") and total:
        parts.append(f"{units.seconds((total - row['step']) * row['step_seconds'])} left")
    parts.append(f"last sign {units.seconds(max(0.0, now - max(signs, default=now)))} ago")
    table = units.columns(_table(start.get("ranks") or [], run.read_ranks()))
    return status, ["  ".join(part for part in parts if part), "", *table]


def _table(ranks: Sequence[Row], table: Row) -> list[list[str]]:
    """Return the head and a row for each rank: shares of its step, and its memory."""
    phases = [phase for phase in STEP_PHASES if any(table.get(phase) or [])]
    head = ["rank", "host", "device", "step", *(PHASE_NAMES[phase] for phase in phases), "memory", "GPU"]
    rows = [head]
    for number, rank in enumerate(ranks):
        seen = {name: values[number] for name, values in table.items() if isinstance(values, list)}
        seconds = seen.get("step") or 0.0
        total, used = seen.get("total"), seen.get("peak")
        busy = seen.get("gpu_utilisation")
        rows.append([
            str(rank.get("rank", number)), str(rank.get("host", "")), str(rank.get("device", "")),
            units.seconds(seconds) if seconds else "–",
            *(f"{seen[phase] / seconds:.0%}" if seconds else "–" for phase in phases),
            f"{units.size(used)} of {units.size(total)}" if used and total else "–",
            "–" if busy is None else f"{busy:.0%}",
        ])  # fmt: skip
    return rows


def run(paths: Sequence[Path], *, once: bool) -> int:
    """Show run directories until the runs have ended or Ctrl+C; once without a terminal."""
    try:
        while True:
            found = [_lines_of(path) for path in paths]
            text = "\n\n".join("\n".join(lines) for _, lines in found)
            if once or not sys.stdout.isatty():
                print(text)
                return 0
            width, height = shutil.get_terminal_size()
            shown = [line[:width] for line in text.splitlines()]
            if len(shown) >= height:
                shown = [*shown[: height - 2], f"… {len(shown) - height + 2} more lines: make the terminal higher"]
            sys.stdout.write("\x1b[H\x1b[2J" + "\n".join(shown) + "\n")  # ECMA-48: to the top, and all of it empty
            sys.stdout.flush()
            if not any(status == "running" for status, _ in found):
                return 0
            time.sleep(_SECONDS)
    except KeyboardInterrupt:
        return 0
