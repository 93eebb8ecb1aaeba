"""Keep the newest checkpoint in the memory of this machine, where it survives the death of a rank.

A storage like any other: the same files, the same commit, the same load on any topology.

    /dev/shm/lockstep-memory-UID-RANDOM/     mode 0700, made by the launcher, removed when it ends
      step-00000100/                         the last complete copy
      step-00000101.tmp-HOST-PID-RANDOM/     the next one, while ranks write it

The way of the data, every `checkpoint.memory_steps` steps:

    tensors → a copy in each rank (`AsyncSaver`, pinned on a GPU; the step goes on)
            → files of this folder, each block from one rank, by a thread over groups of its own
            → the commit: a rename; then the copy before it is deleted

A launch that ends with an error writes the newest copy among the run's checkpoints, where it is
newer than they are (`save_newest`).

Why shared memory: pages of a tmpfs belong to the machine, not to a process. A rank that dies takes
none with it, and neither a neighbour nor the launcher needs a second copy of them. What dies with
the machine is the checkpoint on disk for. The folder holds two copies at most: the complete one is
kept until the next one is complete.

Tests: tests/checkpoint/test_memory.py, tests/faults/test_memory_copies.py
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lockstep.checkpoint.commit import new_draft
from lockstep.checkpoint.keep import list_checkpoints
from lockstep.checkpoint.manifest import read_manifest, verify
from lockstep.checkpoint.posix import PosixStorage, storage_at
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


class MemoryStorage(PosixStorage):
    """Keeps checkpoints in a folder of a tmpfs, which another process has made and will remove."""

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
        found = (step_of(name) for name in self.names())
        return sorted(step for step in found if step is not None)

    def delete_after(self, step: int) -> None:
        """Delete the copies after a step to which the run has gone back."""
        for other in self.steps:
            if other > step:
                self.delete(step_name(other))

    def keep_only(self, step: int) -> None:
        """Delete all other copies, and the drafts of writers that have died."""
        for other in self.steps:
            if other != step:
                self.delete(step_name(other))
        self.sweep()

    def _too_small(self) -> RunError:
        space = os.statvfs(self.root)
        free = space.f_bavail * space.f_frsize // _KIB
        all_of_it = space.f_blocks * space.f_frsize // _KIB
        return RunError(
            "shared memory has no room for another copy",
            where=str(self.root.parent),
            why=f"{free} KiB of {all_of_it} KiB are free, and the last copy stays until the next"
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
    storage = storage_at(folder)
    with new_draft(storage, source.name) as draft:
        for file in read_manifest(source).files:
            with source.open(file) as stream, draft.create(file) as copy:
                shutil.copyfileobj(stream, copy)
        with source.open(MANIFEST) as stream:
            storage.commit(draft.name, source.name, stream.read())
    return storage.path(source.name)
