"""No file of a checkpoint makes a reader take more memory than the file's own bytes.

What a stranger's files claim about sizes is compared with what is there before anything is allocated: a tensor has no
more bytes than were stored for it, blocks do not share bytes, and what lies in a block is not compressed (torch's
archives may be; a megabyte of them can stand for a gigabyte).
"""

import io
import zipfile
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import IO

from torch.distributed.checkpoint.metadata import MetadataIndex

from lockstep.checkpoint.stored_metadata import StoredPart


def check_sizes(stored: StoredPart, sizes: Mapping[str, int], part: str) -> None:
    """Compare what the metadata of a part claims with the bytes of its files.

    Args:
        sizes: of the files of this part, by their paths in the checkpoint.

    Raises:
        ValueError: it claims more than there is.
    """
    used: Counter[str] = Counter()
    for place in stored.places.values():
        file = f"{part}/{place.relative_path}"
        used[file] += place.length
        if place.offset + place.length > sizes[file] or used[file] > sizes[file]:
            raise ValueError(f"it claims more bytes than the {sizes[file]} of {file}")
    for name, tensor in stored.tensors.items():
        for chunk in tensor.chunks:
            claimed = prod(chunk.sizes) * tensor.properties.dtype.itemsize
            there = stored.places[MetadataIndex(name, chunk.offsets)].length
            if claimed > there:
                raise ValueError(f"it claims {claimed} bytes for a block of {name}, where {there} are stored")


def check_block(file: IO[bytes], offset: int, length: int) -> None:
    """Look at the table of a stored block, which is a zip archive of torch's, without reading the block.

    Raises:
        ValueError: it would unpack to more than it is.
    """
    try:
        with zipfile.ZipFile(_Stretch(file, offset, length)) as archive:
            entries = archive.infolist()
    except zipfile.BadZipFile:
        return  # torch's reader says what else it may be, and reads only plain tensors
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("a block is compressed, as torch never writes it")
    if sum(entry.file_size for entry in entries) > length:
        raise ValueError("a block claims to hold more bytes than it has")


class _Stretch(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, start + to)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data
