"""Writes a verdict as one HTML page.

It shows the table, the causes, and the first difference, drawn through the model's modules.

The page holds its style, has no scripts and asks for nothing; names are shown as text, never as
markup.

Tests: tests/verify/test_command.py, tests/verify/test_script.py
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import resources
from itertools import groupby
from pathlib import Path

from lockstep.report.page import write
from lockstep.report.units import moment
from lockstep.verify.comparison_result import Outcome, PartDifference

_SMALLEST = -8.0  # the power of ten at which a bar has no length

_STYLE = """
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.parts { margin-top: 14px; font-size: 13.5px; }
.part { border: 1px solid var(--line); border-radius: 8px; padding: 5px 10px; margin: 5px 0; \
overflow-wrap: anywhere; }
.part.wrong { border-color: var(--bad); }
.part.equal { color: var(--soft); border-style: dashed; }
.part .differs { color: var(--bad); }
.part .first { box-shadow: inset 3px 0 var(--bad); padding-left: 8px; font-weight: 600; }
.bar { display: block; height: 4px; border-radius: 2px; background: var(--bad); margin: 2px 0; }
"""


@dataclass
class DrawnOutcome:
    """An outcome with the lines that the terminal shows of it."""

    title: str
    lines: Sequence[str]  # without the heading
    outcome: Outcome


@dataclass
class _Module:
    inside: dict[str, "_Module"] = field(default_factory=dict)
    found: list[tuple[PartDifference, bool]] = field(default_factory=list)

    def at(self, name: str) -> "_Module":
        module = self
        for part in filter(None, name.split(".")):
            module = module.inside.setdefault(part, _Module())
        return module

    @property
    def differs(self) -> bool:
        return bool(self.found) or any(module.differs for module in self.inside.values())


def write_page(
    path: Path,
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    outcomes: Sequence[DrawnOutcome],
) -> None:
    """Write the page."""
    table = [_row("th", headings), *(_row("td", row) for row in rows)]
    style = (resources.files("lockstep.report") / "page.css").read_text(encoding="utf-8") + _STYLE
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        (
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src'
            " 'unsafe-inline'\">"
        ),
        f"<title>{escape(title)} · Lockstep</title><style>{style}</style></head><body><main>",
        f'<header><h1>{escape(title)}</h1><p class="made">{moment(time.time())}</p></header>',
        f'<div class="card"><div class="scroll"><table>{"".join(table)}</table></div></div>',
        *(_section(outcome) for outcome in outcomes),
        "</main></body></html>",
    ]
    write("\n".join(parts), path)


def _row(cell: str, texts: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{cell}>{escape(text)}</{cell}>' for text in texts)}</tr>"


def _section(drawn: DrawnOutcome) -> str:
    """Return what the page shows of one outcome."""
    outcome = drawn.outcome
    lines = f"<pre>{escape(chr(10).join(drawn.lines))}</pre>" if drawn.lines else ""
    parts = ""
    if outcome.parts:
        model = _Module()
        for name in outcome.parameters:
            model.at(name)
        for number, difference in enumerate(outcome.parts):
            model.at(difference.name).found.append((difference, number == 0))
        parts = f'<div class="parts">{_box("the model", model)}</div>'
    kind, verdict = ("well", "passed") if outcome.passed else ("bad", "differs")
    badge = f'<span class="badge {kind}">{verdict}</span>'
    return f'<h2>{escape(drawn.title)} {badge}</h2><div class="card">{lines}{parts}</div>'


def _box(name: str, module: _Module) -> str:
    """Return the box of a module that differs.

    Modules within it that do not differ share one line.
    """
    inside: list[str] = []
    for differs, parts in groupby(module.inside.items(), key=lambda part: part[1].differs):
        alike = list(parts)
        inside += (
            [_box(*part) for part in alike] if differs else [_equal([part for part, _ in alike])]
        )
    found = "".join(map(_difference, *zip(*module.found, strict=True))) if module.found else ""
    return (
        "<div"
        f' class="part{" wrong" * bool(module.found)}"><b>{escape(name)}</b>'
        f"{found}{''.join(inside)}</div>"
    )


def _equal(names: Sequence[str]) -> str:
    listed = names if len(names) <= 6 else [*names[:3], f"… {len(names) - 4} more …", names[-1]]
    return f'<div class="part equal">{escape(", ".join(listed))}: equal</div>'


def _difference(difference: PartDifference, is_first: bool) -> str:
    size = math.log10(difference.relative) if 0 < difference.relative < math.inf else 0.0
    share = min(1.0, max(0.02, 1 - size / _SMALLEST))
    bar = f'<span class="bar" style="width:{share:.0%}"></span>'
    first = "first: " if is_first else ""
    return f'<div class="differs{" first" * is_first}">{first}{escape(difference.text)}{bar}</div>'
