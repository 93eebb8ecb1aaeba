"""Files that survive a power cut, and their checksums.

A file is on disk once its bytes and the folder that names it are synced. CRC-32 is computed over the bytes as they are
written, so that damage between memory and a later read is noticed; it is not a signature.
Source: POSIX fsync and rename; Pillai et al. 2014, "All File Systems Are Not Created Equal".
"""

import errno
import fcntl
import io
import mmap
import os
import stat
import zlib
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from lockstep.progress import Advance

_CHUNK = 4 << 20  # bytes read at a time for a checksum
_BUFFER = 4 << 20  # bytes written at a time
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux


@dataclass(frozen=True)
class FileFacts:
    """What the manifest holds of a file: its size in bytes and the CRC-32 of its content."""

    size: int
    crc32: int


class ChecksummedStream(io.RawIOBase):
    """A file written from start to end, with the CRC-32 of what went in. It can't seek: a checksum of appended bytes
    only.

    What fills a buffer goes past the page cache, where the file system can do that: a checkpoint is not read again
    soon, would push out what is (the data), and pays for every page that it takes. While a thread writes one buffer,
    the next is filled, and its checksum computed. All of it has been handed to the system when `fileno` is asked for,
    to sync it, or when it is closed; not at a `flush`, which comes at each tensor.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        # "Exclusive": nothing on disk is ever overwritten.
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._buffer, self._other = _buffer(), _buffer()
        self._thread = ThreadPoolExecutor(1)  # starts with the first full buffer
        self._under_way: Future[None] | None = None
        self._held = self._size = self._crc = 0
        self._at_page = True  # all that is in the file ends with a page, as direct writes ask for

    @property
    def facts(self) -> FileFacts:
        """Of what was written so far."""
        return FileFacts(self._size, self._crc)

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]  # any buffer; typeshed's name for it is 3.12's
        done = 0
        while done < len(view):
            more = view[done : done + _BUFFER - self._held]
            self._buffer[self._held : self._held + len(more)] = more
            self._held += len(more)
            done += len(more)
            if self._held == _BUFFER:
                self._pass_on()
        self._crc = zlib.crc32(view, self._crc)
        self._size += len(view)
        return len(view)

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        self._finish()
        return self._handle

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        try:
            self._finish()
        finally:
            self._thread.shutdown()
            os.close(self._handle)

    def _pass_on(self) -> None:
        """Have the full buffer written while the other one is filled."""
        self._held = 0  # after a failure nothing is tried again when this is closed
        self._wait()
        self._under_way = self._thread.submit(self._write_out, self._buffer, _BUFFER, direct=True)
        self._buffer, self._other = self._other, self._buffer

    def _finish(self) -> None:
        """Hand all that is held to the system."""
        held, self._held = self._held, 0
        self._wait()
        self._write_out(self._buffer, held, direct=False)

    def _wait(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _write_out(self, buffer: mmap.mmap, held: int, *, direct: bool) -> None:
        done = 0
        while done < held:  # a raw write may be short: just before the disk is full
            self._at_page = self._at_page and (held - done) % mmap.PAGESIZE == 0
            _set_direct(self._handle, direct and self._at_page)
            with memoryview(buffer) as whole, whole[done:held] as left:
                try:
                    done += os.write(self._handle, left)
                except OSError as error:
                    if error.errno != errno.EINVAL or not (direct and self._at_page):
                        raise
                    self._at_page = False  # it says that it can write directly, and can't: as usual from here on


def _buffer() -> mmap.mmap:
    return mmap.mmap(-1, _BUFFER)  # begins at a page, as direct writes ask for


def _set_direct(handle: int, direct: bool) -> None:
    """Have writes go past the page cache or not; a file system that can't goes on as it is."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    wanted = flags | _DIRECT if direct else flags & ~_DIRECT
    if wanted != flags:
        with suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_SETFL, wanted)


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


def read_inside(root: Path, relative: str, limit: int) -> bytes:
    """The whole of a file below `root` that describes others, opened as `open_inside` does.

    Raises:
        ValueError: it has more than `limit` bytes, as no such file has.
        OSError: see `open_inside`.
    """
    with open_inside(root, relative) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{relative} has more than {limit >> 20} MiB, as nothing that describes a checkpoint has")
    return data


def size_inside(root: Path, relative: str) -> int:
    """The size in bytes of a file below `root`, which is opened as `open_inside` does."""
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
