"""JSON from a stranger: what is read is a dictionary, of bounded size and depth, or a ValueError."""

import json
from typing import Any, NoReturn

JSON_LIMIT = 256 << 20  # bytes: about two million parameters in a manifest
METADATA_LIMIT = 1 << 30  # bytes of DCP's `.metadata`, which names every block of every tensor


def parse_json(data: bytes, *, finite: bool = True) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        finite: refuse NaN and Infinity, which Python writes and reads although JSON has none.

    Raises:
        ValueError: it is not one, or is nested deeper than Python can follow.
    """
    try:
        found = json.loads(data, parse_constant=_refuse if finite else None)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if type(found) is not dict:
        raise ValueError(f"it holds a {type(found).__name__}, where an object is needed")
    return found


def count_of(value: Any) -> int:
    """A size, an offset or a number of things.

    Raises:
        ValueError: it is not a whole number from 0 to 2⁶³ − 1.
    """
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"it holds {str(value)[:40]!r}, where a count is needed")
    return value


def counts_of(values: Any) -> tuple[int, ...]:
    """A list of them."""
    if type(values) is not list:
        raise ValueError(f"it holds {str(values)[:40]!r}, where counts are needed")
    return tuple(count_of(value) for value in values)


def text_of(value: Any) -> str:
    """A string, as it is.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not str:
        raise ValueError(f"it holds {str(value)[:40]!r}, where a text is needed")
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"it holds {constant}, which is no number")
