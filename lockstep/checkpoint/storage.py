"""Define the interface of a storage for checkpoints, and the address of one checkpoint in it.

A checkpoint is a set of files (`model/__0_0.distcp`) and its manifest. It is written as a *draft*,
which no reader sees, and becomes visible whole: begin → write, write, … (every rank its files) →
commit. A folder commits by renaming the draft (`posix.PosixStorage`); an object store writes the
manifest last, on the condition that there is none yet.

Tests: tests/checkpoint/test_storage.py, tests/faults/test_storage.py
"""

import io
import os
import re
import secrets
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from lockstep.config import ObjectSpec
from lockstep.config.schema_training import build_object, check_object
from lockstep.division import ceil_div
from lockstep.errors import UsageError
from lockstep.files.damaged_bytes import DamagedBytesError
from lockstep.heartbeat.writer import went_forward
from lockstep.machine.progress import Advance
from lockstep.registry import require_methods

MANIFEST = "manifest.json"  # files with a manifest are a checkpoint
_STEP = re.compile(r"step-([0-9]{8,})")
# A file's checksum so far is kept each time that so many bytes were written, to verify parts of it.
MARK_BYTES = 1 << 20
_CHUNK = 4 << 20  # bytes read at a time for a checksum
_PIECE = 64 << 20  # bytes handed to a storage at a time


class ByteSink(Protocol):
    """A new file that is written from start to end."""

    def write(self, data: Any, /) -> object:
        """Append all of a bytes-like object."""


@dataclass(frozen=True)
class FilePiece:
    """Bytes of a file that are read at once, from `begin` to `end`."""

    file: str
    size: int  # of the whole file
    begin: int
    end: int


class Storage(ABC):
    """A place that holds checkpoints.

    Subclass it to keep them elsewhere; CONTRIBUTING.md shows how.

    A storage raises an OSError when it can't do something. On any error the save fails on all ranks
    with that reason and is tried again (`checkpoint.retries`). Where it reads, a FileNotFoundError
    and a DamagedBytesError say that the checkpoint is damaged, and a run resumes from an older one;
    any other OSError says that the bytes could not be had, and the run ends with it. Every rank has
    its own object; rank 0 alone calls `begin`, `commit`, `move`, `delete` and `sweep`.
    """

    # Its files are read by the launch that wrote them alone, and by any number of its ranks.
    in_memory = False
    # A read is a request to a service, so that what is needed together is read together, and once.
    is_remote = False

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Return the names of all committed checkpoints.

        The caller passes over names of other things.
        """

    @abstractmethod
    def open(self, name: str, file: str) -> AbstractContextManager[BinaryIO]:
        """Open a file of a checkpoint for reading, with `seek`.

        Raise a FileNotFoundError if there is none.
        """

    @abstractmethod
    def begin(self, name: str) -> str:
        """Begin a checkpoint, and return the name of its draft.

        A draft of this name that a dead writer left is not used again.
        """

    @abstractmethod
    def write(self, draft: str, file: str) -> AbstractContextManager[ByteSink]:
        """Create a file of a draft, durable once the block ends well.

        Raise a FileExistsError if it is there.
        """

    @abstractmethod
    def commit(self, draft: str, name: str, manifest: bytes) -> None:
        """Write `manifest.json` and make the checkpoint visible, durably and atomically.

        An OSError is raised if there is a checkpoint of this name already, or the storage refused.
        """

    @abstractmethod
    def move(self, name: str, new_name: str) -> None:
        """Give a checkpoint, whole or damaged, another name."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a checkpoint or a draft.

        A checkpoint is whole or invisible even if this is interrupted.
        """

    def read(self, name: str, file: str, limit: int) -> bytes:
        """Return the content of a file, or raise a ValueError if it has more than `limit` bytes."""
        with self.open(name, file) as stream:
            data = stream.read(limit + 1)
        if len(data) > limit:
            raise ValueError(
                f"{file} has more than {limit >> 20} MiB, as nothing that describes a"
                " checkpoint has"
            )
        return data

    def pinned(self, name: str) -> str:
        """Return a name of a checkpoint's files that means these alone, as long as they exist."""
        return name

    def read_pieces(
        self, name: str, pieces: Sequence[FilePiece]
    ) -> Generator[tuple[FilePiece, memoryview], None, None]:
        """Yield the bytes of pieces in order, each in one or more smaller ones.

        A FileNotFoundError is raised if a file is not there, a DamagedBytesError if it has another
        size.
        """
        for piece in pieces:
            with self.open(name, piece.file) as stream:
                if (size := stream.seek(0, io.SEEK_END)) != piece.size:
                    raise DamagedBytesError(f"{size} bytes, where {piece.size} were written")
                stream.seek(piece.begin)
                for begin in range(piece.begin, piece.end, _CHUNK):
                    end = min(begin + _CHUNK, piece.end)
                    yield (
                        FilePiece(piece.file, size, begin, end),
                        memoryview(stream.read(end - begin)),
                    )

    def meet(self) -> None:
        """Find the other ranks' storages, where there is something to find; all ranks call it."""
        return None

    def check(self) -> None:
        """Raise a LockstepError if a run could not use the storage; rank 0 asks at its start."""
        return None

    def exists(self, name: str) -> bool:
        """Return whether there is a checkpoint, or anything else, of this name."""
        return name in self.names()

    def sees(self, draft: str) -> bool:
        """Return whether this process sees a draft that another one began.

        True for a storage that hosts share.
        """
        return True

    def sweep(self) -> list[str]:
        """Delete the drafts that dead writers left, and return their names."""
        return []

    def committed_at(self, name: str) -> float | None:
        """Return when a checkpoint was committed, in seconds since 1970, if that is known."""
        return None

    def path(self, name: str) -> "CheckpointPath":
        """Return a checkpoint's address for callers: its `Path`, or a `Location` without one."""
        return Location(self, name)


@dataclass(frozen=True)
class FileInfo:
    """The size of a file in bytes and the CRC-32 of its content, as in the manifest."""

    size: int
    crc32: int | None  # None: a tensor file of a copy in memory, which has none
    # the CRC-32 of its first MiB, of its first two …; none for what older versions wrote
    marks: tuple[int, ...] = field(default=(), compare=False)

    @property
    def is_marked(self) -> bool:
        """Return whether a part of the file can be verified without the rest."""
        return self.crc32 is not None and len(self.marks) == marks_of(self.size)

    def crc_until(self, position: int) -> int:
        """Return the CRC-32 of all bytes before a position, which is a mark or the end."""
        if position == 0:
            return 0
        if position == self.size:
            assert self.crc32 is not None
            return self.crc32
        return self.marks[position // MARK_BYTES - 1]


def marks_of(size: int) -> int:
    """Return the number of marks in a file, which lie before its end."""
    return max(0, ceil_div(size, MARK_BYTES) - 1)


@dataclass(frozen=True)
class Location:
    """The address of one checkpoint, or of one draft: a storage, and a name in it."""

    storage: Storage
    name: str

    def __str__(self) -> str:
        return f"{self.storage}/{self.name}"

    @property
    def path(self) -> "CheckpointPath":
        return self.storage.path(self.name)

    @contextmanager
    def open(self, file: str) -> Generator[BinaryIO, None, None]:
        with self.storage.open(self.name, file) as stream:
            went_forward()
            yield stream

    @property
    def is_remote(self) -> bool:
        """Return whether each read is a request to a service."""
        return self.storage.is_remote

    def pinned(self) -> "Location":
        """Return an address that means these files alone, as long as they exist."""
        return Location(self.storage, self.storage.pinned(self.name))

    def read(self, file: str, limit: int) -> bytes:
        """Return the content of a file, or raise a ValueError if it has more than `limit` bytes."""
        data = self.storage.read(self.name, file, limit)
        went_forward()
        return data

    def size(self, file: str) -> int:
        with self.open(file) as stream:
            return stream.seek(0, io.SEEK_END)

    def checksum(self, file: str, advance: Advance = lambda _bytes: None) -> FileInfo:
        """Read a file and return its size and checksum.

        Call `advance` with the bytes of each chunk.
        """
        size = 0
        crc = 0
        # into the same memory again and again: new memory for each chunk takes longer than to read
        buffer = memoryview(bytearray(_CHUNK))
        with self.open(file) as stream:
            while taken := read_into_buffer(stream, buffer):
                size += taken
                crc = zlib.crc32(buffer[:taken], crc)
                went_forward()
                advance(taken)
        return FileInfo(size, crc)

    @contextmanager
    def create(self, file: str) -> Generator["ChecksumStream", None, None]:
        with self.storage.write(self.name, file) as target:
            went_forward()
            yield ChecksumStream(target)
        went_forward()

    def put(self, file: str, data: bytes) -> FileInfo:
        with self.create(file) as stream:
            stream.write(data)
        return stream.info


def read_into_buffer(stream: BinaryIO, buffer: memoryview) -> int:
    """Read at most as many bytes as the buffer has; return how many, 0 at the end."""
    if isinstance(stream, io.BufferedIOBase | io.RawIOBase):
        return stream.readinto(buffer) or 0
    data = stream.read(len(buffer))
    buffer[: len(data)] = data
    return len(data)


def read_all(stream: BinaryIO, buffer: memoryview) -> int:
    """Fill a buffer from a stream, some MiB at a time; return its bytes, fewer at the end."""
    held = 0
    while held < len(buffer):
        taken = read_into_buffer(stream, buffer[held : held + _CHUNK])
        if not taken:
            break
        held += taken
        went_forward()
    return held


class ChecksumStream(io.RawIOBase):
    """Writes bytes to a new file and computes their checksum.

    It can't seek; closing it leaves the file open.
    """

    def __init__(self, target: ByteSink) -> None:
        super().__init__()
        self._target = target
        self._size = 0
        self._crc = 0
        self._marks: list[int] = []

    @property
    def info(self) -> FileInfo:
        return FileInfo(self._size, self._crc, tuple(self._marks[: marks_of(self._size)]))

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        # a large tensor to a slow storage is not one silent call
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            self._target.write(piece)
            self._add(piece)
            went_forward()
        return len(view)

    def _add(self, piece: memoryview) -> None:
        """Add bytes to the checksum, and keep it at each mark."""
        while len(piece):
            until_mark = piece[: MARK_BYTES - self._size % MARK_BYTES]
            self._crc = zlib.crc32(until_mark, self._crc)
            self._size += len(until_mark)
            if self._size % MARK_BYTES == 0:
                self._marks.append(self._crc)
            piece = piece[len(until_mark) :]

    def tell(self) -> int:
        return self._size


# The public functions take and return paths, or addresses in another storage.
Directory = str | os.PathLike[str] | Storage  # a folder of checkpoints
Checkpoint = str | os.PathLike[str] | Location  # one checkpoint
CheckpointPath = Path | Location  # one checkpoint, as it is returned


def build_storage(spec: ObjectSpec, where: str = "checkpoint.storage") -> Storage:
    """Make the storage that a config names, `package.module:Name`, or raise a UsageError."""
    check_storage(spec, where)
    storage = build_object(spec, where)
    if not isinstance(storage, Storage):
        raise UsageError(
            f"{spec.name} made a {type(storage).__name__}, {_NO_STORAGE}", where=where, fix=_STORAGE
        )
    return storage


_NO_STORAGE = "which is not a storage"
_STORAGE = (
    "name a subclass of lockstep.checkpoint.Storage, or a function that returns an object of one"
)


def check_storage(spec: ObjectSpec, where: str = "checkpoint.storage") -> None:
    """Check that a config's storage exists, takes its arguments and has the methods of one.

    Nothing is made.
    """
    named = check_object(spec, where)
    if isinstance(named, type):
        if not issubclass(named, Storage):
            raise UsageError(f"{spec.name} is a class {_NO_STORAGE}", where=where, fix=_STORAGE)
        require_methods(named, Storage, spec.name, where)


def step_name(step: int) -> str:
    """Return `step-00000100` for 100: at least eight digits, so that names sort as steps do."""
    if step < 0:
        raise UsageError(
            f"a step is not negative, but {step} was to be saved", fix="count steps from 0"
        )
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's name; None for every other name.

    The whole name must match.
    """
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    # step-000000100 would be a second name of step 100
    return step if step_name(step) == name else None


def aside_name(step: int) -> str:
    """Return a name for a checkpoint that is kept, but that no run resumes from.

    It is like `step-00000100.aside-RANDOM`.
    """
    return f"{step_name(step)}.aside-{secrets.token_hex(4)}"
