"""Shows what every rank of a running run does, again each second: `lockstep top RUN`. Does not import torch.

It reads the run directory: events, the end of `metrics.jsonl`, and `ranks.json`, into which rank 0 writes the
measurements of all ranks about once a second. Of a run on another machine the report served there answers:

    lockstep report RUN --live --port 8000        # there
    ssh -N -L 8000:127.0.0.1:8000 MACHINE         # here
    lockstep top http://127.0.0.1:8000
"""

import json
import shutil
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.records import RunDirectory, last_lines
from lockstep.report import units
from lockstep.report.read import PHASE_NAMES, STEP_PHASES, status_of

_LAST_ROWS = 50  # of metrics.jsonl
_SECONDS = 1.0
_ADDRESSES = ("http://", "https://")
State = dict[str, Any]


def state_of(path: Path) -> State:
    """Return what a run directory says of the run now, as plain data. Raises UsageError: it is not a run directory."""
    run, now = RunDirectory(path), time.time()
    if not (run.events.exists() or run.metrics.exists()):
        raise UsageError(
            f"{path} is not a run directory, or nothing has run in it",
            fix="give the folder that `lockstep train --output-dir` writes, or http://127.0.0.1:PORT of a live report",
        )
    events = [event for event in run.read_events() if isinstance(event.get("time"), int | float)]
    rows = [row for row in last_lines(run.metrics, _LAST_ROWS) if "loss" in row and isinstance(row.get("step"), int)]
    start: State = next((event for event in reversed(events) if event.get("kind") == "start"), {})
    row = rows[-1] if rows else {}
    signs = [event["time"] for event in events[-1:]] + [row["time"] for row in rows[-1:] if row.get("time")]
    status = status_of(rows, events, now, is_run=run.config.exists())
    return {
        "name": path.resolve().name, "status": status, "layout": start.get("layout", ""),
        "total": start.get("total_steps"), "seconds_ago": max(0.0, now - max(signs, default=now)),
        "row": {name: row[name] for name in row if not isinstance(row[name], dict | list)},
        "ranks": start.get("ranks") or [], "table": run.read_ranks(),
    }  # fmt: skip


def lines_of(state: State) -> list[str]:
    """Return a run's lines: what it does as a whole, and a table with a line for each rank."""
    row, table = state["row"], state["table"]
    of = f"/{state['total']:,}" if state["total"] else ""
    parts = [state["name"], state["status"], state["layout"], f"step {row.get('step', 0):,}{of}"]
    if isinstance(row.get("loss"), int | float):
        parts.append(f"loss {row['loss']:.4f}")
    rate, unit = (row.get("tokens_per_second"), "tokens") if row.get("tokens_per_second") else (0, "samples")
    if rate or row.get("samples_per_second"):
        parts.append(f"{units.count(rate or row['samples_per_second'])} {unit}/s")
    if state["status"] == "running" and row.get("step_seconds") and state["total"]:
        parts.append(f"{units.seconds((state['total'] - row['step']) * row['step_seconds'])} left")
    parts.append(f"last sign {units.seconds(state['seconds_ago'])} ago")
    return ["  ".join(part for part in parts if part), "", *units.columns(_table(state["ranks"], table))]


def _table(ranks: Sequence[State], table: State) -> list[list[str]]:
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


def run(sources: Sequence[str], *, once: bool) -> int:
    """Show runs, directories or addresses of live reports, until they have ended or Ctrl+C; once without a terminal."""
    try:
        while True:
            states = [state for source in sources for state in _states(source)]
            text = "\n\n".join("\n".join(lines_of(state)) for state in states)
            if once or not sys.stdout.isatty():
                print(text)
                return 0
            width, height = shutil.get_terminal_size()
            shown = [line[:width] for line in text.splitlines()]
            if len(shown) >= height:
                shown = [*shown[: height - 2], f"… {len(shown) - height + 2} more lines: make the terminal higher"]
            sys.stdout.write("\x1b[H\x1b[2J" + "\n".join(shown) + "\n")  # ECMA-48: to the top, and all of it empty
            sys.stdout.flush()
            if not any(state["status"] == "running" for state in states):
                return 0
            time.sleep(_SECONDS)
    except KeyboardInterrupt:
        return 0


def _states(source: str) -> list[State]:
    if not source.startswith(_ADDRESSES):
        return [state_of(Path(source))]
    try:
        with urllib.request.urlopen(source.rstrip("/") + "/top.json", timeout=10) as answer:
            return list(json.load(answer))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{source} does not answer as a live report: {error}",
            fix="run `lockstep report RUN --live --port 8000` there, and `ssh -N -L 8000:127.0.0.1:8000 MACHINE` here",
        ) from None
