"""Explains failures: known errors and their fixes, as `known_errors.md` lists them.

Checks before a run (`doctor`).

It reads files and the environment, and returns text. torch is loaded only by checks that need it.

Tests: tests/diagnose/test_known_errors.py, tests/diagnose/test_first_cause.py
"""

import os
import re
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from lockstep.run_directory.run_files import open_file

_PAGE = Path(__file__).with_name("known_errors.md")
_CELL = re.compile(r"(?<!\\)\|")  # between cells; within them it is written `\|`
# These often follow from a more specific error, which the same text or the log shows.
_VAGUE = (
    "a data worker was killed",
    "the dataset raised",
    "a peer is gone",
    "a collective timed out",
)
_TAIL_BYTES = 16_384

GOOD = "✓"
WARN = "⚠"
BAD = "✗"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    status: str  # ✓, ⚠ or ✗
    name: str  # what was checked
    found: str  # the result
    do: str = ""  # what to do about it, if anything

    def __str__(self) -> str:
        text = f"{self.status} {self.name:<16} {self.found}"
        return f"{text}\n  {'':<16} do: {self.do}" if self.do else text

    @classmethod
    def warn_unless(cls, good: bool, name: str, found: str, do: str) -> "Finding":
        """Return a good finding, or a warning with what to do."""
        return cls(GOOD, name, found) if good else cls(WARN, name, found, do)

    def as_dict(self) -> dict[str, str]:
        """Return it as JSON's types."""
        words = {GOOD: "good", WARN: "warning", BAD: "bad"}
        return asdict(self) | {"status": words[self.status]}


@dataclass(frozen=True)
class KnownError:
    """An error that is recognised by its text."""

    name: str  # short and unique
    # a regular expression for the error's text or the end of a rank's log; case is ignored
    pattern: str
    cause: str  # one sentence without a final full stop
    fix: str  # what to do, likewise
    # whether a test provokes it, or what that needs beyond a CPU; and whether it is often a
    # consequence
    shown: str

    @property
    def consequence(self) -> bool:
        """Return whether another rank's failure usually explains it.

        That one is then reported first.
        """
        return self.shown.endswith("a consequence")


@cache
def table() -> tuple[KnownError, ...]:
    """Return all known errors, in the page's order."""
    rows = [_CELL.split(line)[1:-1] for line in _PAGE.read_text(encoding="utf-8").splitlines()]
    cells = [[cell.strip().replace("\\|", "|") for cell in row] for row in rows if len(row) == 5]
    return tuple(
        KnownError(name, regex.strip("`"), *rest)
        for name, regex, *rest in cells
        if regex.startswith("`")
    )


def recognise(text: str, log: Path | None = None) -> KnownError | None:
    """Return the known error in `text`, if any, a specific one first.

    A killed data worker's log is searched too.
    """
    found = [error for error in table() if re.search(error.pattern, text, re.IGNORECASE)]
    known = min(found, key=lambda error: error.name in _VAGUE, default=None)
    if known is not None and known.name == "a data worker was killed" and log is not None:
        return recognise(f"{text}\n{tail(log)}")
    return known


def tail(log: Path) -> str:
    """Return the end of a log; empty if there is none."""
    try:
        with open_file(log.parent, log.name) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
