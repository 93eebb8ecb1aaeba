"""What an object of somebody else's holds in its attributes, whatever it does when it is asked.

Tests: tests/data/test_generators.py
"""

from contextlib import suppress
from typing import Any


def attributes_of(value: object) -> dict[str, Any] | None:
    """Return the dict of an object's own attributes, the one that it has; None if it has none.

    No property is computed. An object without `__dict__` may answer for it by a `__getattr__` of
    its own, which may raise anything: pydantic's stand-ins for unfinished models do.
    """
    with suppress(Exception):
        return vars(value)
    return None
