"""Checkpoints in memory, kept as an object store keeps them: no folders, no rename, nothing is
overwritten.

Written as a package outside of Lockstep would write it; CONTRIBUTING.md shows it, and
tests/test_contributing.py copies it out of the repository. The contents outlive an object, as a
bucket outlives a process.
"""

import io
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import BinaryIO

from lockstep.checkpoint import MANIFEST, Storage

BUCKET: dict[str, bytes] = {}  # "step-00000100/model/__0_0.distcp" → bytes


class MemoryStorage(Storage):
    """Keeps checkpoints in a dictionary; a checkpoint is there once its manifest is."""

    def __init__(self, bucket: MutableMapping[str, bytes] | None = None) -> None:
        self.bucket = BUCKET if bucket is None else bucket
        self.begun: set[str] = set()  # what this process writes, which sweeping spares

    def __str__(self) -> str:
        return "memory"

    def names(self) -> list[str]:
        return [
            key.removesuffix(f"/{MANIFEST}")
            for key in list(self.bucket)
            if key.endswith(f"/{MANIFEST}")
        ]

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[BinaryIO]:
        key = f"{name}/{file}"
        if key not in self.bucket:
            raise FileNotFoundError(key)
        yield io.BytesIO(self.bucket[key])

    def begin(self, name: str) -> str:
        self.begun.add(name)
        if not self.exists(name):
            self._remove(name)  # a dead writer's
        return name  # files are written where they will stay

    @contextmanager
    def write(self, draft: str, file: str) -> Iterator[BinaryIO]:
        content = io.BytesIO()
        yield content
        self._put(f"{draft}/{file}", content.getvalue())

    def commit(self, draft: str, name: str, manifest: bytes) -> None:
        self._put(f"{name}/{MANIFEST}", manifest)
        self.begun.discard(draft)

    def move(self, name: str, new_name: str) -> None:
        files = self._files(name)
        for file in sorted(files, key=lambda file: file == MANIFEST):  # the manifest last
            self._put(f"{new_name}/{file}", self.bucket[f"{name}/{file}"])
        self.delete(name)

    def delete(self, name: str) -> None:
        self.bucket.pop(f"{name}/{MANIFEST}", None)  # first: what is left is not a checkpoint
        self._remove(name)
        self.begun.discard(name)

    def sweep(self) -> list[str]:
        written = {key.partition("/")[0] for key in list(self.bucket)}
        dead = sorted(written - set(self.names()) - self.begun)
        for name in dead:
            self._remove(name)
        return dead

    def _files(self, name: str) -> list[str]:
        return [
            key.removeprefix(f"{name}/") for key in list(self.bucket) if key.startswith(f"{name}/")
        ]

    def _remove(self, name: str) -> None:
        for file in self._files(name):
            del self.bucket[f"{name}/{file}"]

    def _put(self, key: str, data: bytes) -> None:
        """Put an object on the condition that there is none; one that was put by an earlier try of
        the same is.
        """
        if self.bucket.setdefault(key, data) != data:
            raise FileExistsError(key)
