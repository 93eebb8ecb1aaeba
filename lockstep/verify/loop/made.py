"""Knows which wrappers, optimizers and schedules a script has made, and where.

Models and optimizers know of none of those that wrap or step them.

Tests: tests/verify/test_watch.py, tests/verify/test_sound.py
"""

import weakref
from typing import Any

from lockstep.verify.own_lines import own_line


class MadeObjects:
    """The wrappers, optimizers and schedules that are still there, and the lines that made them."""

    def __init__(self) -> None:
        self._lines: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def note(self, made: Any) -> None:
        """Note an object that is being made."""
        self._lines[made] = own_line()

    def of_kind(self, kind: type) -> list[Any]:
        """Return the objects of a kind that are still there."""
        return [made for made in self._lines if isinstance(made, kind)]

    def line_of(self, made: Any) -> str:
        """Return the user's own line that made an object; empty if it is not known."""
        return self._lines.get(made, "")
