"""A chart of curves over a logarithmic axis, as SVG text: for results that are read without a
program.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")
WIDTH = 860
HEIGHT = 460
# Margins.
LEFT = 64
RIGHT = 220
TOP = 40
BOTTOM = 52


@dataclass(frozen=True)
class Curve:
    """One line with its points; `marks`: the points alone."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    marks: bool = False


def as_svg(curves: Sequence[Curve], x_title: str, y_title: str, level: float | None = None) -> str:
    """The chart.

    Args:
        curves: x above 0.
        level: a value of y that gets a line across; None: there is none.
    """
    xs = [x for curve in curves for x in curve.x]
    ys = sorted([y for curve in curves for y in curve.y] + ([] if level is None else [level]))
    left = log10(min(xs))
    right = log10(max(xs))
    low = ys[0]
    high = ys[-1]
    high += 0.04 * (high - low)
    low -= 0.04 * (high - low)

    def across(x: float) -> float:
        return LEFT + (log10(x) - left) / max(right - left, 1e-9) * (WIDTH - LEFT - RIGHT)

    def down(y: float) -> float:
        return TOP + (high - y) / max(high - low, 1e-9) * (HEIGHT - TOP - BOTTOM)

    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="sans-serif" font-size="12">'
        ),
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(y_title)}</text>',
        (
            f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 12}"'
            f' text-anchor="middle">{escape(x_title)}</text>'
        ),
    ]
    end = WIDTH - RIGHT
    for tick in _ticks(10**left, 10**right):
        parts.append(
            f'<line x1="{across(tick):.1f}" x2="{across(tick):.1f}" y1="{TOP}"'
            f' y2="{HEIGHT - BOTTOM}" stroke="#ddd"/><text x="{across(tick):.1f}"'
            f' y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
        )
    step = 10 ** floor(log10((high - low) / 3))
    for place in range(ceil(low / step), floor(high / step) + 1):
        y = place * step
        parts.append(
            f'<line x1="{LEFT}" x2="{end}" y1="{down(y):.1f}" y2="{down(y):.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{down(y) + 4:.1f}" text-anchor="end">{y:.3g}</text>'
        )
    if level is not None:
        parts.append(
            f'<line x1="{LEFT}" x2="{end}" y1="{down(level):.1f}" y2="{down(level):.1f}"'
            f' stroke="#444" stroke-dasharray="5 4"/><text x="{end + 6}"'
            f' y="{down(level) + 4:.1f}">{level:.3f}</text>'
        )
    for number, curve in enumerate(curves):
        colour = COLOURS[number % len(COLOURS)]
        spots = [(across(x), down(y)) for x, y in zip(curve.x, curve.y, strict=True)]
        place = TOP + 18 * number
        if curve.marks:
            spots.append((end + 30, place))
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>' for x, y in spots
            ]
        else:
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/><line'
                f' x1="{end + 20}" x2="{end + 40}" y1="{place}" y2="{place}" stroke="{colour}"'
                ' stroke-width="2"/>'
            )
        parts.append(f'<text x="{end + 46}" y="{place + 4}">{escape(curve.name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten."""
    powers = range(floor(log10(low)), ceil(log10(high)) + 1)
    return [
        f * 10.0**power for power in powers for f in (1, 2, 5) if low <= f * 10.0**power <= high
    ]
