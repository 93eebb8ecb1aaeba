"""How a benchmark writes its page in results/: what made it and where, words on how to read it, a
table.
"""

import os
import time
from collections.abc import Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """`2 cores, load 0.3, 2026-01-31 12:00 UTC`."""
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {when}"


def page(
    title: str,
    command: str,
    where: str,
    words: Sequence[str],
    header: str,
    rows: Sequence[str],
    after: Sequence[str] = (),
) -> str:
    """The page, in Markdown.

    Args:
        command: that makes it.
        where: it was made, when, and with what; may be empty.
        words: lines on what was measured, and how.
        header: of the table, `| a | b |`.
        rows: the same.
        after: lines below the table.
    """
    said = [f"# {title}", "", f"`{command}`; {where}." if where else f"`{command}`", ""]
    said += [*words, ""] if words else []
    said += [*table(header, rows), ""]
    said += [*after, ""] if after else []
    return "\n".join(said)


def table(header: str, rows: Sequence[str]) -> list[str]:
    """Its lines, with the one that Markdown wants below the header."""
    return [header, "|" + "---|" * (header.count("|") - 1), *rows]


def tell(text: str, path: Path | None) -> None:
    """Print the page, and write it where it is wanted."""
    print(text, flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
