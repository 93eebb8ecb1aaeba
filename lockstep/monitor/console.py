"""Prints a run on the console: a line for each logged step, and on a terminal a progress bar.

The bar is below the lines, and moves at each step.

The bar is one line that is written again, at most twenty times a second. What the program prints
meanwhile goes above it, so that the terminal keeps it; a log file beside the terminal gets plain
lines alone. Numbers that are still on a device are not read for the bar: it shows those of the last
logged step.
"""

import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from lockstep.machine.output import is_rewritable, is_terminal, say, write_out
from lockstep.monitor.media import Media
from lockstep.monitor.sinks import Row, SinkContext
from lockstep.run_directory.records import StepRecord

_LINES_SECONDS = 0.1
_BAR_SECONDS = 0.05
_LONGEST_TEXT = 500  # characters of a logged text


class Console:
    """Prints one line per logged step, below which a terminal shows a bar."""

    at_once = True
    prints_steps = True
    media_kinds = ("text",)

    def __init__(self, context: SinkContext) -> None:
        self._total = context.total_steps
        # step and time of the first record of this process
        self._first: tuple[int, float] | None = None
        self._bar: _Bar | None = None
        self._row: Row = {}
        self._waiting: list[tuple[Row, float | None]] = []
        self._printed = self._drawn = 0.0
        self.each_step = is_rewritable(sys.stdout)

    def on_step(self, row: Row) -> None:
        self._row = row
        self._open_bar()
        if self.prints_steps:
            self._waiting.append((row, self._seconds_left(row["step"])))
            if time.monotonic() - self._printed > _LINES_SECONDS:
                self.flush()

    def on_each_step(self, record: StepRecord) -> None:
        """Draw the bar, a few times a second at most; no number of a device is read for it."""
        now = time.monotonic()
        if now - self._drawn < _BAR_SECONDS and record.step != self._total:
            return
        self._drawn = now
        self._open_bar()
        if self._bar is not None:
            loss = {"loss": record.loss} if isinstance(record.loss, float) else {}
            row = self._row | loss | {"step": record.step}
            self._bar.draw(
                bar_line(row, self._total, self._seconds_left(record.step), self._bar.columns())
            )

    def flush(self) -> None:
        """Print the lines that wait: lines of quick steps are printed together."""
        if self._waiting:
            waiting = self._waiting
            self._waiting = []
            if self._bar is None:
                write_out(_lines(waiting, self._total))
            else:
                self._bar.print(_lines(waiting, self._total, self._bar.columns()))
                # the file beside the terminal, if there is one
                log = getattr(sys.stdout, "log", None)
                if log is not None:
                    log.write(_lines(waiting, self._total))
            self._printed = time.monotonic()

    def on_eval(self, row: Row) -> None:
        self.flush()
        parts = [
            f"{key} {number(value)}" for key, value in row.items() if key not in ("step", "time")
        ]
        say(f"step {row['step']}  {'  '.join(parts)}", prefix="")

    def on_media(self, step: int, media: Mapping[str, Media]) -> None:
        self.flush()
        for name, value in media.items():
            if value.kind == "text":
                more = (
                    f" … ({len(value.text):,} characters)"
                    if len(value.text) > _LONGEST_TEXT
                    else ""
                )
                say(f"step {step}  {name}: {value.text[:_LONGEST_TEXT]}{more}", prefix="")

    def pause(self) -> None:
        self.flush()
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    close = pause

    def go_on_to(self, total_steps: int | None) -> None:
        self._total = total_steps

    def _open_bar(self) -> None:
        if self._bar is None and self.each_step and not _Bar.shown:
            self._bar = _Bar()

    def _seconds_left(self, step: int) -> float | None:
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        first, since = self._first
        if self._total is None or step <= first:
            return None
        return (now - since) / (step - first) * max(0, self._total - step)


class Bar(Console):
    """Shows the bar alone, on a terminal; elsewhere nothing."""

    prints_steps = False


def _lines(
    rows: list[tuple[Row, float | None]], total: int | None, width: int | None = None
) -> str:
    return "".join(step_line(row, total, left, width) + "\n" for row, left in rows)


def step_line(
    row: Row, total: int | None, seconds_left: float | None, width: int | None = None
) -> str:
    """Return a record as one plain line; with a width, without what does not fit."""
    parts = _parts(row, total, seconds_left)
    del parts["memory"]
    return "  ".join(_fitted(parts, width))


def bar_line(row: Row, total: int | None, seconds_left: float | None, width: int) -> str:
    """Return the bar, which is narrower than `width`."""
    parts = _parts(row, total, seconds_left)
    step, *rest = _fitted(parts, width if total is None else width - _LEAST_BAR)
    if total is None:
        return "  ".join([step, *rest])[: width - 1]
    room = min(_WIDEST_BAR, width - 3 - len("  ".join([step, *rest])))
    done = round(room * min(1.0, row["step"] / max(1, total)))
    return "  ".join([step, "━" * done + "─" * (room - done), *rest])[: width - 1]


_LEAST_BAR = 9
_WIDEST_BAR = 40
_FIRST_TO_GO = ("grad", "lr", "seconds", "memory", "rate", "left")  # in a line that is too long


def _parts(row: Row, total: int | None, seconds_left: float | None) -> dict[str, str]:
    """Return the parts of a line by name; "" for those that the row lacks."""
    rate = ""
    if row.get("tokens_per_second"):
        rate = f"{row['tokens_per_second']:,.0f} tokens/s"
    elif row.get("samples_per_second"):
        rate = f"{_rate(row['samples_per_second'])} samples/s"
    return {
        "step": f"step {row['step']}" + (f"/{total}" if total is not None else ""),
        "loss": f"loss {number(row['loss'])}" if "loss" in row else "",
        "grad": f"grad {number(row['grad_norm'])}" if row.get("grad_norm") is not None else "",
        "lr": f"lr {row['lr']:.3g}" if "lr" in row else "",
        "rate": rate,
        "seconds": f"{row['step_seconds']:.3g} s/step" if row.get("step_seconds") else "",
        "memory": _size(row["memory_bytes"]) if row.get("memory_bytes") else "",
        "skipped": "skipped" if row.get("skipped") else "",
        "left": f"{duration(seconds_left)} left" if seconds_left is not None else "",
    }


def _fitted(parts: dict[str, str], width: int | None) -> list[str]:
    for name in ("", *_FIRST_TO_GO):
        parts = {key: text for key, text in parts.items() if text and key != name}
        if width is None or len("  ".join(parts.values())) < width:
            break
    return list(parts.values())


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _size(value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def number(value: Any) -> str:
    """Format with four decimals, or unchanged if it is not a finite number."""
    return (
        f"{value:.4f}" if isinstance(value, (int, float)) and math.isfinite(value) else str(value)
    )


def duration(seconds: float) -> str:
    """Format as hours, minutes and seconds: 1:02:03, 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


_ERASE = "\r\x1b[2K"  # ECMA-48: to the line's begin, and the whole line empty


class _Bar:
    """A line at the bottom of the terminal.

    The text of stdout and stderr goes above it until `close`.
    """

    shown = False

    def __init__(self) -> None:
        _Bar.shown = True
        self._line = ""
        self._lock = threading.RLock()
        self._replaced: list[tuple[Any, str, _Above]] = []
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if is_terminal(stream):
                holder, attribute = (
                    (stream, "console") if hasattr(stream, "console") else (sys, name)
                )
                above = _Above(getattr(holder, attribute), self)
                setattr(holder, attribute, above)
                self._replaced.append((holder, attribute, above))
        self._terminal = self._replaced[0][2].stream

    def columns(self) -> int:
        try:
            return os.get_terminal_size(self._terminal.fileno()).columns or 80
        except OSError:
            return 80

    def draw(self, line: str) -> None:
        with self._lock:
            self._line = line
            self._terminal.write(_ERASE + line)
            self._terminal.flush()

    def above(self, stream: Any, text: str) -> None:
        with self._lock:
            if stream is not self._terminal:
                self._terminal.write(_ERASE)
                self._terminal.flush()
                stream.write(text)
                stream.flush()
                text = ""
            self._terminal.write(_ERASE + text + self._line)
            self._terminal.flush()

    def print(self, text: str) -> None:
        self.above(self._terminal, text)

    def close(self) -> None:
        _Bar.shown = False
        for holder, attribute, above in self._replaced:
            above.finish()
            if getattr(holder, attribute) is above:
                setattr(holder, attribute, above.stream)
        self.draw("")


class _Above:
    """A stream whose text goes above the bar as soon as its line is whole."""

    def __init__(self, stream: Any, bar: _Bar) -> None:
        self.stream = stream
        self._bar = bar
        self._held = ""

    def write(self, text: str) -> int:
        complete, newline, self._held = (self._held + text).rpartition("\n")
        if newline:
            self._bar.above(self.stream, complete + newline)
        return len(text)

    def finish(self) -> None:
        if self._held:
            self.write("\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
