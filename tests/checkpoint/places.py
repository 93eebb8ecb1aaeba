"""Storages under test: each can be damaged, and its writer killed at any moment.

The tests that take `place` run over a folder, where a forked process is killed before each change
of the disk, over a storage in memory, whose writer dies at each of the storage's own lines, and
over a bucket on a real server, whose writer dies before each of its requests.
LOCKSTEP_TEST_STORAGE=package.module:Name has them run over another storage alone, as its author
would; it is called without arguments, and its contents must outlive its objects.
"""

import ast
import io
import json
import os
import shutil
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO
from unittest.mock import patch

import pytest

from lockstep import checkpoint
from lockstep.checkpoint import (
    Directory,
    Location,
    ObjectStorage,
    Storage,
    build_storage,
    object_store,
    posix,
)
from lockstep.checkpoint.host_disk import DiskServer, OtherDisk, OwnDisk
from lockstep.checkpoint.host_disks import DisksClient, HostDisks
from lockstep.config import ObjectSpec
from lockstep.files.object_client import ObjectClient
from tests.checkpoint.shared import CONFIG, snapshot

MOST_LINES = 1000  # that a save runs in a storage; with more, each kill adds to them
BUCKET = "bucket"
DISKS = "disks"
TOKEN = "secret"
SEAL = 12  # bytes after an object
PART = 2048  # bytes of an object of a longer file
MEMORY = "tests.checkpoint.memory_storage:MemoryStorage"
CHANGES = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.rmtree",
}


def tested() -> list[Any]:
    """The storages that the tests run over: `folder`, package.module:Name, or `bucket`."""
    named = os.environ.get("LOCKSTEP_TEST_STORAGE")
    if named:
        return [named]
    # test_object_store.py has a case of each kind in the quick suite
    marks = [pytest.mark.full, pytest.mark.timeout(3600)]
    return ["folder", MEMORY, pytest.param(BUCKET, marks=marks)]


def damaged() -> list[Any]:
    """The storages whose files the tests of damage change: on the disks of hosts, too."""
    named = os.environ.get("LOCKSTEP_TEST_STORAGE")
    return tested() if named else [*tested(), DISKS]


def made_for(request: pytest.FixtureRequest, folder: Path) -> "Place":
    """Return the empty storage that a fixture's parameter names."""
    if request.param == BUCKET:
        request.getfixturevalue("bucket_proxy")
        request.getfixturevalue("monkeypatch").setattr(object_store, "PART_BYTES", PART)
        return Bucket(request.getfixturevalue("bucket_url"))
    if request.param == DISKS:
        disks = Disks(folder)
        request.addfinalizer(disks.close)
        return disks
    return Folder(folder) if request.param == "folder" else Elsewhere(request.param)


class Place(ABC):
    """A storage, and what a test does to it."""

    directory: Directory

    def save(self, step: int, shift: float = 0.0) -> Any:
        return checkpoint.save(self.directory, step, snapshot(shift), config_yaml=CONFIG)

    def names(self) -> list[str]:
        return [path.name for path in checkpoint.list_checkpoints(self.directory)]

    def files(self, path: Any) -> list[str]:
        return [*checkpoint.read_manifest(path).files, checkpoint.MANIFEST]

    @property
    def storage(self) -> Storage:
        return posix.storage_at(self.directory)

    @abstractmethod
    def content(self, path: Any, file: str) -> bytes:
        """What a file holds."""

    @abstractmethod
    def damage(self, path: Any, file: str, data: bytes | None) -> None:
        """Have a file hold something else; None: nothing, it is gone."""

    @abstractmethod
    def moments(self, work: Callable[[], object]) -> Iterator[list[str]]:
        """Each moment at which the process that does `work` can be killed, until it gets through.

        Yields:
            the changes that it came to.
        """

    @abstractmethod
    def killed_at(self, moment: int, work: Callable[[], object]) -> tuple[bool, list[str]]:
        """Kill the process that does `work` just before its change number `moment`.

        Returns:
            (whether it was killed, the changes that it came to).
        """

    def once_a_state(self, look: Callable[..., None], *about: Any) -> None:
        """Look at the checkpoints, unless they have been looked at when all was as now."""
        look(self, *about)

    def reads_once(self) -> AbstractContextManager[object]:
        """Within, an undamaged file may be read from the storage once, and then from memory."""
        return nullcontext()

    def flip(self, path: Any, file: str, position: int) -> None:
        """One bit of one byte, as a bad disk would."""
        data = bytearray(self.content(path, file))
        data[position] ^= 0x10
        self.damage(path, file, bytes(data))


class Folder(Place):
    """A folder; whoever writes is a forked process."""

    def __init__(self, root: Path) -> None:
        self.directory: Path = root

    def content(self, path: Path, file: str) -> bytes:
        return (path / file).read_bytes()

    def damage(self, path: Path, file: str, data: bytes | None) -> None:
        if data is None:
            (path / file).unlink()
        else:
            (path / file).write_bytes(data)

    def moments(self, work: Callable[[], object]) -> Iterator[list[str]]:
        moment = 0
        killed = True
        while killed:
            killed, changes = self.killed_at(moment, work)
            yield changes
            moment += 1

    def killed_at(self, moment: int, work: Callable[[], object]) -> tuple[bool, list[str]]:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            count = 0

            def before(name: str, path: str) -> None:
                nonlocal count
                os.write(write, f"{name} {Path(path).name}\n".encode())
                if count == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

            try:
                watch_disk(self.directory, before)
                work()
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as said:
            changes = said.read().splitlines()
        _, status = os.waitpid(child, 0)
        return os.WIFSIGNALED(status), changes


def watch_disk(root: Path, before: Callable[[str, str], None]) -> None:
    """Call `before(name, path)` ahead of each change that this process makes to the disk below
    `root`.

    Python announces the system calls itself (audit events), so that nothing in the product has to
    cooperate; fsync and writes, which it does not announce, are wrapped. It can't be undone: for a
    process of its own.
    """

    def hear(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open":
            changes = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        else:
            changes = event in CHANGES
        if changes and str(root) in str(arguments[0]):
            before(event, str(arguments[0]))

    writes: Counter[str] = Counter()
    # called ahead of every write
    sync = os.fsync
    set_direct = posix._set_direct

    def watched_sync(handle: int) -> None:
        before("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        sync(handle)

    def watched_write(handle: int, direct: bool) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        writes[path] += 1
        # of many little writes in a row: the 1st, 2nd, 4th, 8th …
        if writes[path].bit_count() == 1:
            before("write", path)
        set_direct(handle, direct)

    os.fsync = watched_sync
    posix._set_direct = watched_write
    sys.addaudithook(hear)


class KilledError(BaseException):
    """The process is gone: nothing that comes after it, no `finally` either, changes
    the storage.
    """


def first_lines(source: str) -> dict[int, int]:
    """Return line → the first line of the statement that it belongs to, where that has several.

    Statements with a body are left out: each of those in it begins by itself.
    """
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
    return {
        line: node.lineno
        for node in statements
        if not hasattr(node, "body")
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


class Elsewhere(Place):
    """A storage of another package. Whoever writes is this process, and dies in a line of the
    storage's own module.
    """

    def __init__(self, name: str, arguments: dict[str, Any] | None = None) -> None:
        self._spec = ObjectSpec(name=name, args=arguments or {})
        self.tampered: dict[str, bytes | None] = {}
        storage = build_storage(self._spec)
        self._module = sys.modules[type(storage).__module__].__file__
        self._begins = first_lines(Path(str(self._module)).read_text())
        for left in storage.names():
            storage.delete(left)
        storage.sweep()
        assert (storage.names(), storage.sweep()) == ([], [])
        self.directory: Mortal = Mortal(storage, self.tampered)

    def content(self, path: Location, file: str) -> bytes:
        with path.open(file) as stream:
            return stream.read()

    def damage(self, path: Location, file: str, data: bytes | None) -> None:
        self.tampered[f"{path.name}/{file}"] = data

    def moments(self, work: Callable[[], object]) -> Iterator[list[str]]:
        moment = 0
        killed = True
        while killed:
            assert moment < MOST_LINES, f"{self._spec.name} runs more lines with each kill"
            killed, changes = self.killed_at(moment, work)
            yield changes
            moment += 1

    def killed_at(self, moment: int, work: Callable[[], object]) -> tuple[bool, list[str]]:
        lines: list[str] = []
        line_of: dict[FrameType, int] = {}  # the line that each call runs
        mortal = self.directory = Mortal(build_storage(self._spec), self.tampered)

        def enter(frame: FrameType, event: str, argument: Any) -> Any:
            code = frame.f_code
            return (
                each_line
                if code.co_filename == self._module and not code.co_name.startswith("<")
                else None
            )

        def each_line(frame: FrameType, event: str, argument: Any) -> Any:
            # From Python 3.12 on a comprehension is part of its function, and announces its lines
            # at each turn: they are the statement's, which begins once.
            line = self._begins.get(frame.f_lineno, frame.f_lineno)
            if event == "line" and line_of.get(frame) != line:
                line_of[frame] = line
                if len(lines) == moment:
                    mortal.dead = True
                    raise KilledError
                lines.append(f"{frame.f_code.co_name} {frame.f_lineno}")
            return each_line

        before = sys.gettrace()
        sys.settrace(enter)
        try:
            work()
        except KilledError:
            pass
        finally:
            sys.settrace(before)
        self.directory = Mortal(build_storage(self._spec), self.tampered)  # another process
        return mortal.dead, lines


class Bucket(Elsewhere):
    """A bucket on a real server. Whoever writes is this process, and dies before a request.

    To read a checkpoint is some 300 requests, of 10 ms each on two busy cores: the server's.
    """

    def __init__(self, url: str) -> None:
        self._states: set[State] = set()  # that were looked at
        super().__init__("lockstep.checkpoint:ObjectStorage", {"url": url})

    @contextmanager
    def reads_once(self) -> Iterator[None]:
        self.directory.kept = {}
        yield
        self.directory.kept = None

    def once_a_state(self, look: Callable[..., None], *about: Any) -> None:
        """Look again where an object differs; ETags tell their bytes, all of them in one answer.

        What is read of checkpoints is a function of these objects alone.
        """
        state = self._state()
        if state not in self._states:
            look(self, *about)
            assert self._state() == state, "to look changes nothing"
            self._states.add(state)

    def _state(self) -> "State":
        """Return name and ETag of each commit, and of each object of a draft that has one."""
        storage = build_storage(self._spec)
        assert isinstance(storage, ObjectStorage)
        store = storage.client._store
        listed = storage.client._obstore.list(store, "").collect()
        objects = {meta["path"]: meta["e_tag"] for meta in listed}
        assert all(objects.values())
        commits = [key for key in objects if key.startswith("commits/")]
        drafts = tuple(f"data/{json.loads(storage.client.get(key))['draft']}/" for key in commits)
        return frozenset(
            (key, tag) for key, tag in objects.items() if key.startswith(("commits/", *drafts))
        )

    def killed_at(self, moment: int, work: Callable[[], object]) -> tuple[bool, list[str]]:
        requests: list[str] = []
        mortal = self.directory = Mortal(build_storage(self._spec), self.tampered)
        ask = ObjectClient._explained
        one_at_a_time = threading.Lock()

        @contextmanager
        def counted(client: ObjectClient, key: str) -> Iterator[None]:
            with one_at_a_time:  # parts are sent by threads
                if len(requests) == moment:
                    mortal.dead = True
                    raise KilledError
                requests.append(key)
            with ask(client, key):
                yield

        with patch.object(ObjectClient, "_explained", counted), suppress(KilledError):
            work()
        self.directory = Mortal(build_storage(self._spec), self.tampered)  # another process
        return mortal.dead, requests


State = frozenset[tuple[str, str]]  # names of objects, and their ETags


def of_two_hosts(folder: str, port: int) -> HostDisks:
    """What a rank has on the first of two hosts, whose second one serves its disk at a port."""
    storage = HostDisks(folder)
    client = storage.client
    assert isinstance(client, DisksClient)
    client.disks.append(OtherDisk("the disk of the second host", "127.0.0.1", port, TOKEN))
    return storage


class Disks(Elsewhere):
    """The disks of two hosts, which share nothing; what is damaged is so on both.

    The seals of objects stay as they were, as on a bad disk.
    """

    def __init__(self, folder: Path) -> None:
        self.roots = [folder / "first", folder / "second"]
        self._server = DiskServer(OwnDisk(self.roots[1]), "127.0.0.1", TOKEN)
        arguments = {"folder": str(self.roots[0]), "port": self._server.port}
        self._seals: dict[Path, bytes] = {}  # of objects that were damaged
        super().__init__(f"{__name__}:of_two_hosts", arguments)

    def close(self) -> None:
        self._server.close()

    def damage(self, path: Location, file: str, data: bytes | None) -> None:
        for on_disk in self.objects(path, file):
            if data is None:
                on_disk.unlink()
            else:
                on_disk.write_bytes(data + self._seals[on_disk])

    def objects(self, path: Location, file: str) -> list[Path]:
        """The files of an object on both disks, the first host's first."""
        commit = f"commits/{path.name}"
        draft = json.loads(OwnDisk(self.roots[0]).read(commit))["draft"]
        found = [root / "data" / draft / file for root in self.roots]
        for on_disk in found:
            if on_disk not in self._seals:
                self._seals[on_disk] = on_disk.read_bytes()[-SEAL:]
        return found


class Mortal(Storage):
    """A storage whose process may be dead, and whose files may hold other bytes than
    were written.
    """

    def __init__(self, inner: Storage, tampered: dict[str, bytes | None]) -> None:
        self._inner = inner
        self._tampered = tampered
        self.dead = False
        self.kept: dict[str, bytes] | None = None  # the files that were read
        self.is_remote = inner.is_remote  # which decides how a load reads

    def __str__(self) -> str:
        return str(self._inner)

    @property
    def inner(self) -> Storage:
        if self.dead:
            raise KilledError
        return self._inner

    def names(self) -> Sequence[str]:
        return self.inner.names()

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[BinaryIO]:
        key = f"{name}/{file}"
        if self.kept is not None and self._tampered.get(key, b"") is not None:
            if key not in self.kept:
                with self.inner.open(name, file) as stream:
                    self.kept[key] = stream.read()
            yield io.BytesIO(self._tampered.get(key, self.kept[key]) or b"")
            return
        with self.inner.open(name, file) as stream:
            if self._tampered.get(key, b"") is None:
                raise FileNotFoundError(key)
            yield io.BytesIO(self._tampered[key] or b"") if key in self._tampered else stream

    def begin(self, name: str) -> str:
        return self.inner.begin(name)

    @contextmanager
    def write(self, draft: str, file: str) -> Iterator[Any]:
        with self.inner.write(draft, file) as stream:
            yield stream

    def commit(self, draft: str, name: str, manifest: bytes) -> None:
        self.inner.commit(draft, name, manifest)

    def move(self, name: str, new_name: str) -> None:
        self.inner.move(name, new_name)
        moved = [key for key in self._tampered if key.startswith(f"{name}/")]
        self._tampered.update(
            {new_name + key.removeprefix(name): self._tampered.pop(key) for key in moved}
        )

    def delete(self, name: str) -> None:
        self.inner.delete(name)

    def exists(self, name: str) -> bool:
        return self.inner.exists(name)

    def sees(self, draft: str) -> bool:
        return self.inner.sees(draft)

    def sweep(self) -> list[str]:
        return self.inner.sweep()

    def committed_at(self, name: str) -> float | None:
        return self.inner.committed_at(name)


def remove(path: Any) -> None:
    """Delete a checkpoint, whichever storage it is in."""
    if isinstance(path, Path):
        shutil.rmtree(path)
    else:
        path.storage.delete(path.name)
