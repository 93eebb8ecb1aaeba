"""Keep checkpoints in a folder of a file system, where they survive a kill and a power cut.

    step-00000100/                       a checkpoint: all of it was on disk before it got this name
    step-00000100.tmp-HOST-PID-RANDOM/   a draft, perhaps of a writer that died; never read
    .shared.tmp-HOST-PID-RANDOM/         made briefly, to find out whether all ranks see it; swept
                                         like a draft
    step-00000100.aside-RANDOM/          moved out of the way; never read, never deleted

A file is on disk once its bytes and the folder that lists it are synced. A commit syncs every file
and folder of the draft, renames it, and syncs the folder above. Before the rename there is no new
checkpoint, after it a whole one. Source: POSIX fsync and rename; Pillai et al. 2014, "All File
Systems Are Not Created Equal".
"""

import errno
import fcntl
import io
import mmap
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from lockstep.checkpoint.storage import MANIFEST, ByteSink, Checkpoint, Directory, Location, Storage
from lockstep.files.paths import local_path
from lockstep.heartbeat.writer import went_forward
from lockstep.run_directory.run_files import open_file

_BUFFER = 4 << 20  # bytes written at a time
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux
# a writer on another host that has not touched its draft for this long is dead
ABANDONED_SECONDS = 3600.0
_DRAFT = re.compile(r"(?:step-[0-9]{8,}|\.shared)\.tmp-([A-Za-z0-9._-]+)-([0-9]+)-([0-9a-f]{8})")

_in_flight: set[str] = set()  # the drafts of this process, which `sweep` leaves alone


class PosixStorage(Storage):
    """Keeps checkpoints in a folder, which the first one creates."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = local_path(root, "the folder of checkpoints")

    def __str__(self) -> str:
        return str(self.root)

    def path(self, name: str) -> Path:
        return self.root / name

    def names(self) -> list[str]:
        """Return the names of the folders; none where there is no folder yet.

        A link to a folder that is not there is an error: its disk may not be mounted.
        """
        try:
            return [
                entry.name for entry in os.scandir(self.root) if entry.is_dir(follow_symlinks=False)
            ]
        except NotADirectoryError:
            return []
        except FileNotFoundError:
            if self.root.is_symlink():
                raise
            return []

    def exists(self, name: str) -> bool:
        return os.path.lexists(self.root / name)

    def sees(self, draft: str) -> bool:
        return (self.root / draft).is_dir()

    def committed_at(self, name: str) -> float:
        return (self.root / name / MANIFEST).stat().st_mtime

    @contextmanager
    def open(self, name: str, file: str) -> Generator[BinaryIO, None, None]:
        """Open a file for reading.

        Neither it nor a folder inside the checkpoint may be a symbolic link.
        """
        with open_file(self.root / name, *file.split("/")) as stream:
            yield stream

    def begin(self, name: str) -> str:
        draft = draft_name(name)
        _in_flight.add(draft)
        try:
            _make_folders(self.root)
            (self.root / draft).mkdir()
            went_forward()
        except OSError:
            _in_flight.discard(draft)
            raise
        return draft

    @contextmanager
    def write(self, draft: str, file: str) -> Generator[ByteSink, None, None]:
        """Write a file of a draft, past the page cache; it is durable when the block ends."""
        changed = {folder := self.root / draft}
        for part in Path(file).parent.parts:
            folder /= part
            changed.add(folder)
            if not folder.is_dir():
                folder.mkdir(exist_ok=True)  # another rank may be making it
                went_forward()
        with UncachedFile(self.root / draft / file) as stream:
            yield stream
            os.fsync(stream.fileno())
        if draft not in _in_flight:  # else this process commits it, and syncs all its folders then
            for folder in sorted(changed, reverse=True):
                sync_folder(folder)

    def commit(self, draft: str, name: str, manifest: bytes) -> None:
        folder = self.root / draft
        with self.write(draft, MANIFEST) as stream:
            stream.write(manifest)
        inside = [path for path in folder.rglob("*") if path.is_dir()]
        for path in [*sorted(inside, reverse=True), folder]:
            sync_folder(path)
        folder.rename(self.root / name)
        _in_flight.discard(draft)
        sync_folder(self.root)

    def move(self, name: str, new_name: str) -> None:
        (self.root / name).rename(self.root / new_name)
        sync_folder(self.root)

    def delete(self, name: str) -> None:
        if name in _in_flight:
            _in_flight.discard(name)
            with suppress(OSError):  # the rest is swept later
                _remove(self.root / name)
            return
        doomed = draft_name(name)  # renamed first, so that a kill leaves no half checkpoint
        self.move(name, doomed)
        _remove(self.root / doomed)

    def sweep(self) -> list[str]:
        dead = [
            name
            for name in sorted(self.names())
            if name not in _in_flight and _is_dead_draft(self.root / name)
        ]
        for name in dead:
            with suppress(OSError):  # another process may be deleting it
                _remove(self.root / name)
        return dead


def storage_at(directory: Directory) -> Storage:
    """Return the storage of a folder of checkpoints; return a storage unchanged."""
    return directory if isinstance(directory, Storage) else PosixStorage(directory)


def locate(checkpoint: Checkpoint) -> Location:
    """Return the address of a checkpoint, which may be given by its path."""
    if isinstance(checkpoint, Location):
        return checkpoint
    path = local_path(checkpoint, "the checkpoint")
    if path.name in ("", ".."):
        path = path.absolute().resolve()
    return Location(PosixStorage(path.parent), path.name)


def draft_name(name: str, host: str | None = None, pid: int | None = None) -> str:
    """Return a new name for a draft that a process (by default this one) writes."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", host or socket.gethostname()) or "host"
    return f"{name}.tmp-{host}-{os.getpid() if pid is None else pid}-{secrets.token_hex(4)}"


def is_draft(name: str) -> bool:
    """Return whether a name is one that `draft_name` made."""
    return _DRAFT.fullmatch(name) is not None


def writer_has_ended(draft: str) -> bool | None:
    """Return whether the process that began a draft has ended; None: it is on another host."""
    match = _DRAFT.fullmatch(draft)
    own = _DRAFT.fullmatch(draft_name("step-00000000"))
    if match is None or own is None:
        return False
    if match[1] != own[1]:
        return None
    return match[2] == own[2] or not _lives(int(match[2]))


def _lives(pid: int) -> bool:
    """Return whether a process exists that is not a zombie, which writes nothing."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _is_dead_draft(folder: Path) -> bool:
    """Return whether the writer of a draft has ended.

    For a writer on another host: whether nothing has touched the draft for an hour.
    """
    ended = writer_has_ended(folder.name)
    if ended is not None:
        return ended
    try:
        touched = max(entry.stat().st_mtime for entry in (folder, *folder.rglob("*")))
    except FileNotFoundError:  # it is being removed or renamed just now
        return False
    return time.time() - touched > ABANDONED_SECONDS


def _make_folders(path: Path) -> None:
    if path.is_dir():
        return
    _make_folders(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Sync a folder, so that the names in it are durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
    went_forward()


def _remove(folder: Path) -> None:
    """Delete a folder.

    Each file that is gone shows on a slow disk that the deletion goes forward.
    """
    for inside, _, files in os.walk(folder):  # which does not enter linked folders
        for file in files:
            Path(inside, file).unlink(missing_ok=True)
            went_forward()
    shutil.rmtree(folder)


class UncachedFile(io.RawIOBase):
    """A new file, written from start to end without the page cache.

    It uses the page cache where the file system does not support direct writes.

    In the cache a checkpoint would push out the data. `fileno`, which `fsync` needs, and `close`
    hand all bytes to the system; `flush` does not.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        # O_EXCL: no file is ever overwritten.
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        # page-aligned
        self._buffer = mmap.mmap(-1, _BUFFER)
        self._other = mmap.mmap(-1, _BUFFER)
        self._thread = ThreadPoolExecutor(1)  # starts with the first full buffer
        self._pending_write: Future[None] | None = None
        self._buffered = 0  # bytes in the buffer
        self._at_page_end = True  # the file ends at a page boundary, which direct writes need

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """Take bytes: one buffer is filled while a thread writes the other."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            more = view[done : done + _BUFFER - self._buffered]
            self._buffer[self._buffered : self._buffered + len(more)] = more
            self._buffered += len(more)
            done += len(more)
            # the thread writes this buffer, and the other one is filled
            if self._buffered == _BUFFER:
                self._buffered = 0  # after a failure, `close` does not write it again
                self._wait()
                self._pending_write = self._thread.submit(
                    self._write_out, self._buffer, _BUFFER, direct=True
                )
                self._buffer, self._other = self._other, self._buffer
        return len(view)

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

    def _finish(self) -> None:
        held = self._buffered
        self._buffered = 0
        self._wait()
        self._write_out(self._buffer, held, direct=False)

    def _wait(self) -> None:
        pending = self._pending_write
        self._pending_write = None
        if pending is not None:
            pending.result()

    def _write_out(self, buffer: mmap.mmap, held: int, *, direct: bool) -> None:
        """Write a buffer, past the page cache as far as pages are complete."""
        done = 0
        while done < held:  # a write may be short, just before the disk is full
            self._at_page_end = self._at_page_end and (held - done) % mmap.PAGESIZE == 0
            _set_direct(self._handle, direct and self._at_page_end)
            with memoryview(buffer) as view, view[done:held] as left:
                try:
                    done += os.write(self._handle, left)
                except OSError as error:
                    if error.errno != errno.EINVAL or not (direct and self._at_page_end):
                        raise
                    # the file system has no direct writes: use the page cache from here on
                    self._at_page_end = False


def _set_direct(handle: int, direct: bool) -> None:
    """Switch direct writes on or off; a file system without them is left as it is."""
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    wanted = flags | _DIRECT if direct else flags & ~_DIRECT
    if wanted != flags:
        with suppress(OSError):
            fcntl.fcntl(handle, fcntl.F_SETFL, wanted)
