"""Explains failures: known errors, their fixes and symptoms (`known_errors`), checks before a run (`doctor`).

It reads files and the environment, and returns text. torch is loaded only by checks that need it.
"""

import re
from dataclasses import asdict, dataclass
from functools import cached_property

GOOD, WARN, BAD = "✓", "⚠", "✗"


@dataclass(frozen=True)
class KnownError:
    """An error that is recognised by its text.

    Attributes:
        name: short and unique.
        pattern: a regular expression for the error's text or the end of a rank's log; case is ignored.
        cause: one sentence without a final full stop.
        fix: what to do, likewise.
        example: the text as libraries write it; required with `needs`, because then no test provokes it.
        needs: what it takes to provoke it, beyond a machine with a CPU.
        consequence: whether another rank's failure usually explains it; that one is then reported first.
    """

    name: str
    pattern: str
    cause: str
    fix: str
    example: str = ""
    needs: str = ""
    consequence: bool = False

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The compiled pattern."""
        return re.compile(self.pattern, re.IGNORECASE)


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

    def as_dict(self) -> dict[str, str]:
        """Return it as JSON's types."""
        words = {GOOD: "good", WARN: "warning", BAD: "bad"}
        return asdict(self) | {"status": words[self.status]}
