"""Keep the newest files of a bucket's checkpoints on this machine's disk too.

    FOLDER/1f2e3d4c/step-00000100.tmp-HOST-PID-RANDOM/model/__0_0.distcp

Each rank keeps the files that it writes, by the name of their draft, which no other checkpoint has.
The bucket decides what a checkpoint is; a file from here is used where it has the size and the
checksum of the bucket's manifest, and is deleted where it has not. So nothing here has to be
synced, and losing it costs time alone.

Tests: tests/checkpoint/test_local_cache.py
"""

import logging
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.checkpoint.storage import ByteSink, FileInfo
from lockstep.heartbeat.writer import went_forward
from lockstep.run_directory.run_files import open_file

KEPT = 2  # checkpoints, beside the one that is being written
_CHUNK = 4 << 20  # bytes read at a time for a checksum

_log = logging.getLogger(__name__)


class LocalCache:
    """The files of the newest checkpoints that this machine has written to one store.

    Args:
        folder: of this machine; several runs may share it.
        store: the URL of the store.
    """

    def __init__(self, folder: Path, store: str) -> None:
        self._root = folder / f"{zlib.crc32(store.encode()):08x}"
        self._verified: set[tuple[str, str]] = set()  # draft and file
        self._has_warned = False

    @contextmanager
    def writing(self, draft: str, file: str, target: ByteSink) -> Iterator[ByteSink]:
        """Yield a sink that writes a file to the target, and to this cache if that is possible."""
        copied = _CachingSink(target, self._create(draft, file), self._warn)
        try:
            yield copied
        except BaseException:
            copied.end(None)
            raise
        copied.end(self._root / draft / file)

    def open(self, draft: str, file: str, info: FileInfo) -> BinaryIO | None:
        """Open a file that is here as the manifest describes it; None if it is not."""
        try:
            stream = open_file(self._root / draft, *file.split("/"))
        except OSError:
            return None
        if (draft, file) not in self._verified:
            if _info_of(stream) != info:
                stream.close()
                _log.warning("warning: %s/%s/%s is damaged: deleted", self._root, draft, file)
                with suppress(OSError):
                    (self._root / draft / file).unlink()
                return None
            self._verified.add((draft, file))
            stream.seek(0)
        return stream

    def drop(self, draft: str) -> None:
        """Delete the files of a draft."""
        shutil.rmtree(self._root / draft, ignore_errors=True)

    def _create(self, draft: str, file: str) -> BinaryIO | None:
        """Create a file that has another name until it is complete; None if that is impossible."""
        path = self._root / draft / file
        try:
            if not (self._root / draft).is_dir():
                self._make_room()
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}").open("xb")
        except OSError as error:
            self._warn(error)
            return None

    def _make_room(self) -> None:
        """Delete all but the newest folders, before one more is made."""
        with suppress(FileNotFoundError):
            folders = [entry for entry in os.scandir(self._root) if entry.is_dir()]
            for entry in sorted(folders, key=lambda entry: entry.stat().st_mtime)[:-KEPT]:
                self.drop(entry.name)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("warning: checkpoint.local_cache can't be written: %s", error)


class _CachingSink:
    """Writes to a target and to a file, which is given up where it can't be written."""

    def __init__(self, target: ByteSink, copy: BinaryIO | None, warn: Any) -> None:
        self._target = target
        self._copy = copy
        self._warn = warn

    def write(self, data: Any, /) -> None:
        self._target.write(data)
        if self._copy is not None:
            try:
                self._copy.write(data)
            except OSError as error:  # the disk is full
                self._warn(error)
                self.end(None)

    def end(self, path: Path | None) -> None:
        """Close the file, and give it its name; without one, delete it."""
        copy = self._copy
        self._copy = None
        if copy is None:
            return
        try:
            copy.close()
            if path is not None:
                os.replace(copy.name, path)
                return
        except OSError as error:
            self._warn(error)
        with suppress(OSError):
            os.unlink(copy.name)


def _info_of(stream: BinaryIO) -> FileInfo:
    size = 0
    crc = 0
    while chunk := stream.read(_CHUNK):
        size += len(chunk)
        crc = zlib.crc32(chunk, crc)
        went_forward()
    return FileInfo(size, crc)
