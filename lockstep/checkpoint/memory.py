"""Keep the newest checkpoint in the memory of this machine, where it survives the death of a rank.

A storage like any other: the same files, the same commit, the same load on any topology.

    /dev/shm/lockstep-memory-UID-RANDOM/     mode 0700, made by the launcher, removed when it ends
      step-00000100/                         the last complete copy
      step-00000099.tmp-HOST-PID-RANDOM/     the next one, while ranks write it

The way of the data, every `checkpoint.memory_steps` steps, after a step and before it is recorded:

    tensors → files of this folder, each block from one rank (`memory_writer.py`)
            → every rank has written: the draft has a manifest
            → the step is recorded (metrics.jsonl)
            → the commit: a rename; the folder of the copy before becomes the next draft

So no recorded step is trained again where a copy is made at each. A rank that dies before all have
written leaves a step that nobody has read of; rank 0, which dies between the record and the commit,
a draft with a manifest, whose step the records have come to: it is shown then (`adopt`). Of several
hosts each has such a folder, and all files in it (`memory_hosts.py`).

A launch that ends with an error writes the newest copy among the run's checkpoints, where it is
newer than they are (`save_newest`).

Why shared memory: pages of a tmpfs belong to the machine, not to a process. A rank that dies takes
none with it, and neither a neighbour nor the launcher needs a second copy of them. What dies with
all machines is the checkpoint on disk for. The folder holds two copies at most: the complete one is
kept until the next one is complete.

Tests: tests/checkpoint/test_memory.py, tests/faults/test_memory_copies.py
"""

import errno
import hashlib
import mmap
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from lockstep.checkpoint.convert import rewrite_full
from lockstep.checkpoint.keep import list_checkpoints
from lockstep.checkpoint.manifest import (
    CONFIG,
    STATE,
    DamagedError,
    Manifest,
    read_manifest,
    verify,
)
from lockstep.checkpoint.posix import PosixStorage, draft_name, is_draft, storage_at
from lockstep.checkpoint.storage import (
    MANIFEST,
    CheckpointPath,
    Directory,
    Location,
    step_name,
    step_of,
)
from lockstep.errors import RunError

_KIB = 1 << 10
_UNREAD = "manifest.unread"  # the manifest of a draft to which ranks are still writing


@dataclass(frozen=True)
class Holdings:
    """The steps of the copies of one host."""

    shown: frozenset[int]
    complete: frozenset[int]  # those that are shown, too
    unread: frozenset[int]  # of drafts that some rank may not have written


class MemoryStorage(PosixStorage):
    """Keeps checkpoints in a folder of a tmpfs, which another process has made and will remove."""

    in_memory = True

    def path(self, name: str) -> Location:  # type: ignore[override]
        """Return a copy's address, by which a reader knows where it lies."""
        return Location(self, name)

    @contextmanager
    def write(self, draft: str, file: str) -> Generator[BinaryIO, None, None]:
        """Write a file of a draft.

        Nothing is synced, since nothing of a tmpfs survives the machine.
        """
        path = self.root / draft / file
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "xb") as stream:
                yield stream
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._too_small() from error

    @property
    def steps(self) -> list[int]:
        """The steps of the complete copies, the oldest first."""
        steps = (step_of(name) for name in self.names())
        return sorted(step for step in steps if step is not None)

    def delete_after(self, step: int) -> None:
        """Delete the copies after a step to which the run has gone back."""
        for other in self.steps:
            if other > step:
                self.delete(step_name(other))

    def delete_others(self, step: int) -> None:
        """Delete all other copies."""
        for other in self.steps:
            if other != step:
                self.delete(step_name(other))

    def delete_drafts(self) -> None:
        """Delete all drafts: those of writers that have died, or that begin anew."""
        for name in self.names():
            if is_draft(name):
                shutil.rmtree(self.root / name, ignore_errors=True)

    def make_mapped(self, draft: str, file: str, size: int) -> mmap.mmap:
        """Make a file of a draft, of so many bytes, and map it into this process.

        Raises:
            RunError: there is no room. Without this look, a write into the map would end Python.
        """
        path = self.root / draft / file
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            return mmap.mmap(handle, size)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._too_small() from error
        finally:
            os.close(handle)

    def describe(self, draft: str, files: dict[str, bytes], manifest: bytes) -> None:
        """Write a draft's files besides tensors, and its manifest, which nobody reads yet.

        The draft may hold those of an earlier copy.
        """
        self._forget(draft)
        for file, data in {**files, _UNREAD: manifest}.items():
            with self.write(draft, file) as stream:
                stream.write(data)

    def mark_complete(self, draft: str) -> None:
        """Note that all ranks have written their parts of a draft."""
        (self.root / draft / _UNREAD).rename(self.root / draft / MANIFEST)

    def show(self, draft: str, name: str) -> None:
        """Make a complete draft visible, in the place of a copy of its name."""
        if self.exists(name):  # of a step that was trained again
            self.delete(name)
        (self.root / draft).rename(self.root / name)

    def hide(self, name: str) -> str:
        """Make a draft of a copy, whose files are written again; return its name."""
        draft = draft_name(name)
        (self.root / name).rename(self.root / draft)
        self._forget(draft)
        return draft

    def holdings(self) -> Holdings:
        """Return which copies there are."""
        shown = frozenset(self.steps)
        drafts = self._drafts()
        complete = frozenset(step for step, is_complete in drafts.values() if is_complete)
        unread = frozenset(step for step, is_complete in drafts.values() if not is_complete)
        return Holdings(shown, shown | complete, unread)

    def adopt(self, step: int, *, is_complete: bool = False) -> None:
        """Show the copy of a step that was complete when its writer died, if there is one.

        Args:
            step: of the copy.
            is_complete: whether it is known to be complete, also where that was not noted.
        """
        for draft, (step_of_draft, has_manifest) in self._drafts().items():
            if (
                step_of_draft != step
                or self.exists(step_name(step))
                or not (has_manifest or is_complete)
            ):
                continue
            if not has_manifest:
                self.mark_complete(draft)
            self.show(draft, step_name(step))

    def _drafts(self) -> dict[str, tuple[int, bool]]:
        """Return the drafts that a manifest describes: name → (step, whether all have written)."""
        drafts: dict[str, tuple[int, bool]] = {}
        for draft in filter(is_draft, self.names()):
            with suppress(DamagedError):  # it is not complete
                drafts[draft] = read_manifest(Location(self, draft)).step, True
                continue
            with suppress(FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
                data = (self.root / draft / _UNREAD).read_bytes()
                drafts[draft] = Manifest.from_bytes(data).step, False
        return drafts

    def _forget(self, draft: str) -> None:
        for file in (MANIFEST, _UNREAD, STATE, CONFIG):
            (self.root / draft / file).unlink(missing_ok=True)

    def _too_small(self) -> RunError:
        space = os.statvfs(self.root)
        free = space.f_bavail * space.f_frsize // _KIB
        total = space.f_blocks * space.f_frsize // _KIB
        return RunError(
            "shared memory has no room for another copy",
            where=str(self.root.parent),
            why=f"{free} KiB of {total} KiB are free, and the last copy stays until the next"
            " one is complete",
            fix="give it more (docker run --shm-size=…, or mount -o remount,size=…), or leave"
            " checkpoint.memory_steps out",
        )


def copies_of(memory: Path, run: Path) -> MemoryStorage:
    """Return where a launch keeps the copies of a run: each of its runs has a folder of its own."""
    name = hashlib.sha256(os.fsencode(run.absolute())).hexdigest()[:16]
    return MemoryStorage(memory / name)


def save_newest(copies: MemoryStorage, folder: Directory) -> CheckpointPath | None:
    """Write the newest complete copy into a folder of checkpoints, if it is newer than they are.

    Return the new checkpoint; None: none was written.
    """
    kept = [step_of(path.name) or 0 for path in list_checkpoints(folder)]
    newer = [step for step in copies.steps if step > max(kept, default=0)]
    sources = [Location(copies, step_name(step)) for step in reversed(newer)]
    source = next((copy for copy in sources if not verify(copy)), None)
    if source is None:
        return None
    return rewrite_full(source, Location(storage_at(folder), source.name))
