"""Leaves out documents, and counts which and why.

Tests: tests/data/test_filters.py
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.data.mistakes import users_line
from lockstep.errors import UsageError
from lockstep.registry import load_object, require_call


@dataclass
class Filters:
    """The conditions under which a document is kept.

    Args:
        min_tokens: of a document.
        max_tokens: of a document; unset: any number.
        keep: `package.module:function`, which takes the row of a document, a dict, and returns
            whether it is kept; unset: all are.
    """

    min_tokens: int = 1
    max_tokens: int | None = None
    keep: str | None = None
    kept: int = 0  # documents
    left_out: Counter[str] = field(default_factory=Counter)  # documents by reason

    def __post_init__(self) -> None:
        self._function: Callable[[Any], Any] | None = None
        if self.keep is not None:
            self._function = load_object(self.keep, "keep")
            require_call(self._function, ["row"], self.keep, "keep")
        if self.min_tokens < 1:
            what = f"min_tokens {self.min_tokens} leaves nothing out"
            raise UsageError(what, where="min_tokens", fix="write 1 or more, or leave it out")
        most = self.max_tokens
        if most is not None and most < self.min_tokens:
            what = f"max_tokens {most} is below min_tokens {self.min_tokens}: nothing is kept"
            raise UsageError(what, where="max_tokens", fix="raise it, or leave it out")

    def go_on_from(self, kept: int, left_out: Mapping[str, int]) -> None:
        """Count on from what an earlier process has counted."""
        self.kept = kept
        self.left_out = Counter(left_out)

    def takes(self, row: Mapping[str, Any] | None, where: str) -> bool:
        """Return what the user's function says to a row; a UsageError if it fails.

        Nothing is counted: `refuse` does that, where documents are gathered.
        """
        if self._function is None:
            return True
        if row is None:
            what = f"{self.keep} is asked about rows, and {where} has none"
            fix = "use it for .jsonl, .parquet and .arrow files"
            raise UsageError(what, where="keep", fix=fix)
        try:
            return bool(self._function(dict(row)))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            what = f"{self.keep} failed for {where}"
            raise UsageError(what, where=users_line(error), why=why) from error

    def refuse(self) -> None:
        """Count a document that the user's function refuses."""
        self.left_out[f"refused by {self.keep}"] += 1

    def fits(self, tokens: int) -> bool:
        """Return whether a document of so many tokens is kept."""
        if tokens == 0:
            reason = "empty"
        elif tokens < self.min_tokens:
            reason = f"shorter than {self.min_tokens} tokens"
        elif self.max_tokens is not None and tokens > self.max_tokens:
            reason = f"longer than {self.max_tokens} tokens"
        else:
            self.kept += 1
            return True
        self.left_out[reason] += 1
        return False


def told(left_out: Mapping[str, int]) -> str:
    """Return what was left out, in words; empty if nothing was."""
    parts = [f"{count:,} {reason}" for reason, count in sorted(left_out.items())]
    return f"left out {', '.join(parts)}" if parts else ""
