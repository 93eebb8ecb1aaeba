"""Formats numbers and tables for people.

Tests: tests/report/test_report.py
"""

from collections.abc import Sequence
from datetime import UTC, datetime


def seconds(value: float) -> str:
    """Format seconds: `1:02:03 h`, `2:03 min`, `4.5 s`, `12 ms`, `30 µs`."""
    if value >= 3600:
        return f"{int(value // 3600)}:{int(value % 3600 // 60):02}:{int(value % 60):02} h"
    if value >= 60:
        return f"{int(value // 60)}:{int(value % 60):02} min"
    if value >= 1:
        return f"{_digits(value)} s"
    return f"{_digits(value * 1e3)} ms" if value >= 1e-3 else f"{_digits(value * 1e6)} µs"


def count(value: float) -> str:
    """Format a count: `12,345`; `1.23 M`, `4.5 G`."""
    for factor, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= factor:
            return f"{_digits(value / factor)} {sign}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(value: float) -> str:
    """Format bytes: `1.5 GiB`."""
    for factor, sign in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{_digits(value / factor)} {sign}"
    return f"{value:.0f} B"


def _digits(value: float) -> str:
    """Format with three digits, or all those before the point; never `1e+03`."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def moment(epoch: float) -> str:
    """Format a time: `2026-01-31 12:00:00 UTC`."""
    return datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table whose columns are as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
