"""Images as a PNG file, without a library."""

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

ENLARGED = 4


def write_png(path: Path, images: Tensor, columns: int) -> None:
    """Write images [N, H, W] with values in [0, 1] as a grid of grey ones, row by row."""
    rows = images.detach().cpu().split(columns)
    blank = torch.zeros_like(images[:1]).expand(columns, -1, -1)
    grid = torch.cat([torch.cat([*row, *blank[len(row) :]], dim=1) for row in rows])
    pixels = (
        grid.clamp(0, 1)
        .mul(255)
        .round()
        .byte()
        .repeat_interleave(ENLARGED, 0)
        .repeat_interleave(ENLARGED, 1)
    )
    height, width = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)  # 8 bits of grey
    lines = b"".join(b"\0" + bytes(line.tolist()) for line in pixels)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines)), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
