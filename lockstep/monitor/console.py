"""Shows the run on the console: a live bar on a terminal, plain lines elsewhere; the log file always gets lines."""

import math
import sys
import time
from typing import Any, TextIO

from lockstep.monitor.sinks import Row, SinkContext

_LINES_SECONDS = 0.1


class Console:
    """Prints one line per logged step, or shows a bar."""

    at_once = True

    def __init__(self, context: SinkContext) -> None:
        total_steps, start_step = context.total_steps, context.start_step
        self._total = total_steps
        self._first: tuple[int, float] | None = None  # step and time of the first record of this process
        self._live: _Live | None = None
        self._waiting: list[tuple[Row, float | None]] = []
        self._shown = 0.0
        if sys.stdout.isatty():
            self._live = _Live(total_steps, start_step)

    def on_step(self, row: Row) -> None:
        """Show a step."""
        left = self._seconds_left(row)
        if self._live is None:
            self._waiting.append((row, left))
            if time.monotonic() - self._shown > _LINES_SECONDS:
                self.flush()
        else:
            log = getattr(sys.stdout, "log", None)
            if log is not None:
                log.write(step_line(row, self._total, left) + "\n")
            self._live.show(row, left)

    def flush(self) -> None:
        """Print the lines that wait: lines of quick steps are printed together."""
        if self._waiting:
            lines = [step_line(row, self._total, left) + "\n" for row, left in self._waiting]
            self._waiting.clear()
            sys.stdout.write("".join(lines))
            sys.stdout.flush()
            self._shown = time.monotonic()

    def on_eval(self, row: Row) -> None:
        """Print an evaluation's line."""
        self.flush()
        parts = [f"{key} {number(value)}" for key, value in row.items() if key not in ("step", "time")]
        print(f"step {row['step']}  {'  '.join(parts)}", flush=True)

    def close(self) -> None:
        """Print the lines that wait, and remove the bar."""
        self.flush()
        if self._live is not None:
            self._live.close()

    def _seconds_left(self, row: Row) -> float | None:
        now = time.monotonic()
        if self._first is None:
            self._first = (row["step"], now)
        first, since = self._first
        step = int(row["step"])
        if self._total is None or step <= first:
            return None
        return (now - since) / (step - first) * max(0, self._total - step)


def step_line(row: Row, total: int | None, seconds_left: float | None) -> str:
    """Return a record as one plain line."""
    of = f"/{total}" if total is not None else ""
    parts = [f"step {row['step']}{of}", f"loss {number(row['loss'])}"]
    if row.get("grad_norm") is not None:
        parts.append(f"grad {number(row['grad_norm'])}")
    parts.append(f"lr {row['lr']:.3g}")
    if row.get("tokens_per_second"):
        parts.append(f"{row['tokens_per_second']:,.0f} tokens/s")
    elif row.get("samples_per_second"):
        parts.append(f"{_rate(row['samples_per_second'])} samples/s")
    if row.get("step_seconds"):
        parts.append(f"{row['step_seconds']:.3g} s/step")
    if row.get("skipped"):
        parts.append("skipped")
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def _rate(value: float) -> str:
    """Format with three digits below 100, else as a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def number(value: Any) -> str:
    """Format with four decimals, or unchanged if it is not a finite number."""
    return f"{value:.4f}" if isinstance(value, (int, float)) and math.isfinite(value) else str(value)


def duration(seconds: float) -> str:
    """Format as hours, minutes and seconds: 1:02:03, 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


class _Live:
    """A bar at the bottom of the terminal, below the program's output."""

    def __init__(self, total: int | None, start_step: int) -> None:
        from rich.console import Console as RichConsole
        from rich.file_proxy import FileProxy
        from rich.progress import BarColumn, Progress, TextColumn

        self._tee: Any = sys.stdout if hasattr(sys.stdout, "console") else None
        self._terminal: TextIO = self._tee.console if self._tee is not None else sys.stdout
        console = RichConsole(file=self._terminal)
        self._progress = Progress(
            TextColumn("step {task.completed:.0f}" + (f"/{total}" if total is not None else "")),
            BarColumn(),
            TextColumn("{task.description}"),
            console=console,
            redirect_stdout=self._tee is None,
            redirect_stderr=self._tee is None,
        )
        self._task = self._progress.add_task("", total=total, completed=start_step)
        self._progress.start()
        if self._tee is not None:  # the log is written as before; only the console's text goes above the bar
            self._tee.console = FileProxy(console, self._terminal)

    def show(self, row: Row, seconds_left: float | None) -> None:
        text = step_line(row, None, seconds_left).partition("  ")[2]
        self._progress.update(self._task, completed=row["step"], description=text)

    def close(self) -> None:
        self._progress.stop()
        if self._tee is not None:
            self._tee.console.flush()
            self._tee.console = self._terminal
