"""Summarises samples, to tell whether two processes, or two runs, have read the same ones.

A summary has a row for each value in a sample. Whole numbers, truth values and texts have a
checksum. Floats and images have sums, which are compared within a tolerance: another processor
decodes an image, or adds up, in a slightly different way. Values of other kinds are not evidence,
and have no row.

Tests: tests/data/test_ranks.py, tests/data/test_iterable.py
"""

import dataclasses
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

Row = list[Any]
"""[checksum], or [sum, weighted sum, sum of magnitudes] of floats; JSON."""

_TOLERANCE = 1e-4  # of the sum of magnitudes; images of noise differ by 3e-3
_MOST_NUMBERS = 100_000  # of a tensor or an array that are looked at
_IMAGE_PIXELS = 64  # bytes of fewer are labels or tokens


def summary(sample: Any) -> list[Row]:
    """Return the rows of a sample, a batch or any other item of data."""
    return [row for value in _values(sample) if (row := _row(value)) is not None]


def alike(first: list[Row], second: list[Row]) -> bool:
    """Return whether two summaries are those of the same data."""
    return len(first) == len(second) and all(map(same_row, first, second))


def same_row(first: Row, second: Row) -> bool:
    """Return whether two rows are those of the same value."""
    if len(first) != len(second) or len(first) == 1:
        return first == second
    allowed = _TOLERANCE * (first[2] + second[2])
    return all(abs(mine - its) <= allowed for mine, its in zip(first, second, strict=True))


def _values(item: Any) -> Iterator[Any]:
    """Yield the values in nested containers."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        item = [getattr(item, field.name) for field in dataclasses.fields(item)]
    if isinstance(item, Mapping):
        item = list(item.values())
    if isinstance(item, list | tuple):
        for part in item:
            yield from _values(part)
    else:
        yield item


def _row(value: Any) -> Row | None:
    """Return the row of one value; None for kinds that are not evidence."""
    if value is None or isinstance(value, bool | int | str | bytes):
        return [zlib.crc32(repr(value).encode())]
    if isinstance(value, float | complex):
        value = np.asarray(value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return None
        value = _sampled(value.detach().reshape(-1))
        # NumPy lacks some formats
        value = (value.float() if value.is_floating_point() else value).cpu().numpy()
    elif not isinstance(value, np.ndarray | np.generic) and hasattr(value, "__array__"):
        # an image of Pillow
        with suppress(Exception):
            value = np.asarray(value)
    if not isinstance(value, np.ndarray | np.generic):
        return None
    return _row_of_array(np.asarray(value).reshape(-1))


def _sampled(flat: Any) -> Any:
    return flat[:: 1 + len(flat) // _MOST_NUMBERS]


def _row_of_array(flat: Any) -> Row | None:
    flat = _sampled(flat)
    if flat.dtype.kind in "biuSU" and not (flat.dtype == np.uint8 and len(flat) >= _IMAGE_PIXELS):
        return [zlib.crc32(np.ascontiguousarray(flat).tobytes())]
    if flat.dtype.kind not in "fcu":
        return None
    numbers = np.nan_to_num((np.abs(flat) if flat.dtype.kind == "c" else flat).astype(np.float64))
    weights = np.linspace(0.5, 1.5, len(numbers))
    return [float(numbers.sum()), float(numbers @ weights), float(np.abs(numbers).sum())]
