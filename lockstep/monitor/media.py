"""Defines what a user may log besides numbers: texts, images and histograms.

A string is a text; an array of one dim is a histogram of its values, of two dims [H, W], three [C,
H, W] or [H, W, C], or four [N, C, H, W] an image or a row of them; so is an image of Pillow or a
figure of Matplotlib. Images become PNG.

Tests: tests/monitor/test_log.py
"""

import io
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from torch import Tensor

from lockstep.errors import UsageError

BINS = 32
MEDIA_KINDS = ("text", "image", "histogram")
_CHANNELS = {1: 0, 3: 2, 4: 6}  # number of channels → PNG's colour type


@dataclass(frozen=True)
class Media:
    """A logged value that is not a number."""

    kind: Literal["text", "image", "histogram"]
    text: str = ""
    png: bytes = b""  # of an image, the whole file
    size: tuple[int, int] = (0, 0)  # of an image, width and height in pixels
    counts: tuple[int, ...] = ()  # of a histogram: values in each bin
    edges: tuple[float, ...] = ()  # of a histogram: the bounds of bins, one more


def file_name(name: str, step: int) -> str:
    """Return the name of a file for a logged value, without its ending."""
    return re.sub(r"[^\w.-]+", "_", name) + f"-{step}"


def sorted_values(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Media]]:
    """Return the numbers, and everything else, by name."""
    numbers: dict[str, float] = {}
    media: dict[str, Media] = {}
    for name, value in values.items():
        if name in ("step", "time", "loss", "media"):
            what = f"{name!r} is a name of the run's own records"
            raise UsageError(what, where="trainer.log", fix="log it by another name")
        logged = _understood(name, value)
        if isinstance(logged, Media):
            media[name] = logged
        else:
            numbers[name] = logged
    return numbers, media


def _understood(name: str, value: Any) -> float | Media:
    """Return a value as a number, text, image or histogram; refuse anything else."""
    if isinstance(value, str):
        return Media("text", text=value)
    is_figure = hasattr(value, "savefig")  # of Matplotlib
    is_image = hasattr(value, "save") and hasattr(value, "getbands")  # of Pillow
    if is_figure or is_image:
        save = value.savefig if is_figure else value.save
        buffer = io.BytesIO()
        save(buffer, format="png")
        width, height = struct.unpack(">II", buffer.getvalue()[16:24])
        return Media("image", png=buffer.getvalue(), size=(width, height))
    array = _array(value)
    if array is None or array.ndim > 4:
        fix = (
            "log a number, a text, a tensor of one dim (a histogram), [H, W], [C, H, W] or [N, C,"
            " H, W] (an image)"
        )
        raise UsageError(
            f"{name!r} is a {type(value).__name__}, which can't be logged",
            where="trainer.log",
            fix=fix,
        )
    if array.ndim == 0:
        return float(array)
    if array.ndim == 1:
        counts, edges = np.histogram(array[np.isfinite(array)].astype(np.float64), bins=BINS)
        return Media("histogram", counts=tuple(map(int, counts)), edges=tuple(map(float, edges)))
    return _image(name, array)


def _array(value: Any) -> np.ndarray[Any, Any] | None:
    if isinstance(value, Tensor):
        value = value.detach().cpu()  # host waits for the device
        value = value.float() if value.is_floating_point() else value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):
        return None
    return array if array.dtype.kind in "biuf" else None


def _image(name: str, array: np.ndarray[Any, Any]) -> Media:
    """Return an image: floats from 0 to 1, other numbers from 0 to 255."""
    if array.dtype.kind == "f":
        array = np.nan_to_num(array).clip(0, 1) * 255 + 0.5
    elif array.dtype.kind == "b":
        array = array * 255
    pixels = array.astype(np.uint8)
    if pixels.ndim == 4:
        pixels = np.concatenate(list(pixels), axis=-1)  # side by side: [C, H, N × W]
    if pixels.ndim == 3 and pixels.shape[0] in _CHANNELS:
        pixels = pixels.transpose(1, 2, 0)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    if pixels.shape[-1] not in _CHANNELS:
        what = f"{name!r} has the shape {list(array.shape)}, which is not an image"
        fix = (
            "log [H, W], [C, H, W], [H, W, C] or [N, C, H, W] with 1, 3 or 4 channels; a histogram"
            " is of one dim: tensor.flatten()"
        )
        raise UsageError(what, where="trainer.log", fix=fix)
    return Media("image", png=_png(pixels), size=(pixels.shape[1], pixels.shape[0]))


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Return [H, W, C] of 8 bits as a PNG file (W3C's PNG specification, chapters 5 and 11)."""
    height, width, channels = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    rows = b"".join(b"\0" + row.tobytes() for row in np.ascontiguousarray(pixels))
    header = struct.pack(">IIBBBBB", width, height, 8, _CHANNELS[channels], 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )
