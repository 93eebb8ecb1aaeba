"""Write and read small tensors as `torch.save` does, without its cost for each.

DCP stores each block of a tensor as an archive of `torch.save`: a zip file, in which the elements
lie between a head and a tail.

    head   the pickle that names dtype and shape, and the zip header of the elements
    data   the elements, row by row
    tail   the CRC-32 of the elements, twice, and the directory of the zip file

The head is the same for all contiguous tensors of one dtype and shape. So torch makes an archive
once, and those of further tensors are filled in; what was read is compared with the head, and
needs no unpickling where it is equal. Anything else is left to `torch.save` and `torch.load`.

One thing differs from what torch writes: the tail's `serialization_id`, a name that torch derives
from the elements and that no reader uses, is the same for all archives of a form.

Tests: tests/checkpoint/test_archives.py
"""

import io
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import BinaryIO

import torch
from torch import Tensor

from lockstep.models.safetensors_files import tensor_bytes

SMALL = 1 << 20  # bytes: of a larger tensor torch's cost for each archive is a small part
_FORMS = 4096  # dtypes and shapes that are kept; a form has two kilobytes

_CRC_FOLLOWS = 1 << 3  # the flag of an entry whose CRC-32 comes after its data
_LOCAL_NAME = struct.Struct("<26xHH")  # a zip header before data: lengths of its name and its extra
_ENTRY = b"PK\x03\x04"
_AFTER_DATA = b"PK\x07\x08"
_IN_DIRECTORY = b"PK\x01\x02"
_DIRECTORY_CRC = 16  # bytes into an entry of the directory
_DIRECTORY_NAME = 46


@dataclass(frozen=True)
class ArchiveForm:
    """The archive that torch makes of a contiguous tensor of one dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    head: bytes
    tail: bytes
    crc_places: tuple[int, ...]  # in the tail

    @property
    def num_bytes(self) -> int:
        """The size of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def length(self) -> int:
        """The size of an archive."""
        return len(self.head) + self.num_bytes + len(self.tail)

    def pieces(self, tensor: Tensor) -> list[bytes | memoryview]:
        """Return the archive of a tensor, in pieces to be written one after the other."""
        data = tensor_bytes(tensor)
        crc = zlib.crc32(data).to_bytes(4, "little")
        tail = bytearray(self.tail)
        for place in self.crc_places:
            tail[place : place + 4] = crc
        return [self.head, data, bytes(tail)]

    def tensor(self, archive: memoryview) -> Tensor | None:
        """Return the tensor of an archive, a copy; None if the archive has another form."""
        begin = len(self.head)
        if len(archive) != self.length or archive[:begin] != self.head:
            return None
        data = bytearray(archive[begin : begin + self.num_bytes])
        return torch.frombuffer(data, dtype=self.dtype).view(self.shape)


def form_of(tensor: Tensor) -> ArchiveForm | None:
    """Return the form of a tensor's archive; None if `torch.save` has to write it."""
    if type(tensor) is not Tensor or tensor.is_conj() or tensor.is_neg():
        return None
    return form_for(tensor.dtype, tensor.shape)


def form_for(dtype: torch.dtype, shape: Sequence[int]) -> ArchiveForm | None:
    """Return the form of the archives of small tensors; None for large ones and empty ones."""
    if not 0 < prod(shape) * dtype.itemsize <= SMALL:
        return None
    return _form(dtype, tuple(shape))


@lru_cache(maxsize=_FORMS)
def _form(dtype: torch.dtype, shape: tuple[int, ...]) -> ArchiveForm | None:
    """Have torch make an archive, and find its parts; None if it is laid out otherwise."""
    stream = io.BytesIO()
    torch.save(torch.zeros(shape, dtype=dtype), stream)
    archive = stream.getvalue()
    with zipfile.ZipFile(stream) as opened:
        entries = [entry for entry in opened.infolist() if "/data/" in entry.filename]
    if len(entries) != 1 or not entries[0].flag_bits & _CRC_FOLLOWS:
        return None
    entry = entries[0]
    name = entry.filename.encode()
    begin = begin_of_data(stream, entry)
    head = archive[:begin]
    tail = archive[begin + entry.file_size :]
    in_directory = tail.rfind(name) - _DIRECTORY_NAME
    is_as_expected = (
        entry.file_size == prod(shape) * dtype.itemsize
        and name in head
        and tail.startswith(_AFTER_DATA)
        and tail[in_directory : in_directory + 4] == _IN_DIRECTORY
    )
    if not is_as_expected:
        return None
    return ArchiveForm(dtype, shape, head, tail, (len(_AFTER_DATA), in_directory + _DIRECTORY_CRC))


def begin_of_data(archive: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Return where the bytes of an entry of a zip file begin; a ValueError if there is no entry."""
    archive.seek(entry.header_offset)
    header = archive.read(_LOCAL_NAME.size)
    if len(header) < _LOCAL_NAME.size or not header.startswith(_ENTRY):
        raise ValueError("a block's directory points at no entry")
    name_length, extra_length = _LOCAL_NAME.unpack(header)
    return int(entry.header_offset + len(header) + name_length + extra_length)
