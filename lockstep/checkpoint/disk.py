"""Files that survive a power cut, and their checksums.

A file is on disk once its bytes and the folder that names it are synced. CRC-32 is computed over the bytes as they are
written, so that damage between memory and a later read is noticed; it is not a signature.
Source: POSIX fsync and rename; Pillai et al. 2014, "All File Systems Are Not Created Equal".
"""

import io
import os
import stat
import zlib
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.progress import Advance

_CHUNK = 4 << 20  # bytes read at a time for a checksum


@dataclass(frozen=True)
class FileFacts:
    """What the manifest holds of a file: its size in bytes and the CRC-32 of its content."""

    size: int
    crc32: int


class ChecksummedStream(io.RawIOBase):
    """A file written from start to end, with the CRC-32 of what went in. It can't seek: a checksum of appended bytes
    only.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("xb", buffering=0)  # "x": nothing on disk is ever overwritten
        self._size = 0
        self._crc = 0

    @property
    def facts(self) -> FileFacts:
        return FileFacts(self._size, self._crc)

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # any buffer; typeshed's name for it is 3.12's
        done = 0
        while done < len(view):  # a raw write may be short: at 2 GiB, and just before the disk is full
            done += self._file.write(view[done:])
        self._crc = zlib.crc32(view, self._crc)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def write_file(path: Path, data: bytes) -> FileFacts:
    """Write a new file and sync it. The folder that holds it still has to be synced."""
    with ChecksummedStream(path) as stream:
        stream.write(data)
        os.fsync(stream.fileno())
        return stream.facts


def make_directories(path: Path) -> None:
    """Make a folder, and those above it that are not there, each durably named in the one above."""
    if path.is_dir():
        return
    make_directories(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def open_inside(root: Path, relative: str) -> Generator[io.BufferedReader, None, None]:
    """Open a file below `root` for reading; neither it nor a folder on the way may be a symbolic link.

    Raises:
        OSError: it is not there, is not an ordinary file, or is reached through a link.
    """
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        *parents, name = relative.split("/")
        for parent in parents:
            deeper = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = deeper
        handle = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{relative} is not an ordinary file")
        yield file


def size_inside(root: Path, relative: str) -> int:
    with open_inside(root, relative) as file:
        return os.fstat(file.fileno()).st_size


def facts_inside(root: Path, relative: str, advance: Advance = lambda _bytes: None) -> FileFacts:
    """Read a file and say what it holds; `advance` is told of each piece."""
    size, crc = 0, 0
    with open_inside(root, relative) as file:
        while chunk := file.read(_CHUNK):
            size += len(chunk)
            crc = zlib.crc32(chunk, crc)
            advance(len(chunk))
    return FileFacts(size, crc)
