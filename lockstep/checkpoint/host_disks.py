"""Keep checkpoints on the disks of the hosts, which share no folder: each file on two hosts.

A bucket of our own (`object_store.py`), over one disk of each host:

    host 0   data of ranks 0, 1   and of host 2's ranks   commits
    host 1   data of ranks 2, 3   and of host 0's ranks   commits
    host 2   data of ranks 4, 5   and of host 1's ranks   commits

A rank writes an object to its own host's disk and, through a server there (`host_disk.py`), to that
of the next host. The commit is written on all hosts, after all data are durable on two: so a
checkpoint that any host knows of is complete as long as no two neighbours are gone. A rank reads
from its own disk what is there, and from other hosts what is not, or what is damaged here; its
host's damaged copy is written anew.

Tests: tests/checkpoint/test_host_disks.py
"""

import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from lockstep.checkpoint.host_disk import Disk, DiskServer, OtherDisk, OwnDisk
from lockstep.checkpoint.object_store import ObjectStorage
from lockstep.checkpoint.ranks import Ranks
from lockstep.errors import RunError
from lockstep.files.damaged_bytes import DamagedBytesError
from lockstep.files.object_client import ObjectClient
from lockstep.files.paths import local_path
from lockstep.machine.network import address_towards
from lockstep.machine.output import say

T = TypeVar("T")
_log = logging.getLogger(__name__)
_EVERYWHERE = "commits/"  # what is written on all hosts


class HostDisks(ObjectStorage):
    """Keeps checkpoints on the hosts' own disks.

    `checkpoint.storage: disks:FOLDER` is short for it.

    Args:
        folder: on a disk of each host.
    """

    def __init__(self, folder: str) -> None:
        root = local_path(folder, "checkpoint.storage").absolute()
        self._disks = DisksClient(OwnDisk(root))
        self._server: DiskServer | None = None
        self._use(self._disks)

    def meet(self) -> None:
        """Find the other hosts' disks; every rank calls it."""
        if self._server is not None or len(self._disks.disks) > 1:
            return
        ranks = Ranks()
        if ranks.size == 1:
            say(f"warning: {self}: the checkpoints are on one host alone")
            return
        failure = f"the hosts' disks in {self} could not be connected"
        own = self._disks.own
        token = ranks.broadcast(failure, lambda: secrets.token_hex(16))
        places = ranks.all_reduce(failure, lambda: _place_of(own), list)
        hosts = list(dict.fromkeys(places))
        own_host = hosts.index(places[ranks.rank])
        address = address_towards(os.environ.get("MASTER_ADDR", "")) or "127.0.0.1"

        def serve() -> tuple[str, int] | None:
            """Start this host's server, in its first rank."""
            if places.index(places[ranks.rank]) != ranks.rank or len(hosts) == 1:
                return None
            own.sweep()
            self._server = DiskServer(own, address, token)
            return address, self._server.port

        served = ranks.all_reduce(failure, serve, list)
        others: list[Disk] = []
        for number in range(own_host + 1, own_host + len(hosts)):  # the next host first
            first = places.index(hosts[number % len(hosts)])
            served_there = served[first]
            assert served_there is not None
            others.append(OtherDisk(f"the disk of rank {first}'s host", *served_there, token))
        self._disks.disks = [own, *others]
        if ranks.is_main and not others:
            say(f"warning: {self}: the checkpoints are on one host alone")


class DisksClient(ObjectClient):
    """The objects of all hosts; `disks` are this host's, the next one's, and the others'."""

    def __init__(self, own: OwnDisk) -> None:
        self.url = f"disks:{own.root}"
        self.own = own
        self.disks: list[Disk] = [own]
        self._told: set[tuple[str, str]] = set()  # what is damaged: disk and key

    def put_new(self, key: str, data: Any) -> None:
        """Create an object on this host's disk and on the next one's; a commit on all."""
        for disk in self.disks if key.startswith(_EVERYWHERE) else self.disks[:2]:
            disk.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        """Refuse to overwrite: a checkpoint needs none of it."""
        raise OSError(f"{self.url}/{key}: nothing is overwritten on hosts' disks")

    def get(self, key: str) -> bytes:
        return self._first(key, lambda disk: disk.read(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._first(key, lambda disk: disk.read(key, start, length))
        if len(data) != length:
            raise DamagedBytesError(f"{self.url}/{key} gave {len(data)} of {length} bytes")
        return data

    def get_within(self, key: str, limit: int) -> bytes | None:
        return None if self.size(key) > limit else self.get(key)

    def get_piece(self, key: str, start: int, length: int, size: int) -> memoryview:
        if (has := self.size(key)) != size:
            what = f"{self.url}/{key} has {has} bytes, where {size} were written"
            raise DamagedBytesError(what)
        return memoryview(self.get_range(key, start, length))

    def size(self, key: str) -> int:
        return self._first(key, lambda disk: disk.size(key))

    def exists(self, key: str) -> bool:
        """Return whether there is an object, damaged or not."""
        with suppress(FileNotFoundError):
            self.modified(key)
            return True
        return False

    def modified(self, key: str) -> float:
        return self._first(key, lambda disk: disk.created(key))

    def inside(self, folder: str) -> list[str]:
        return sorted({name for disk in self.disks for name in disk.inside(folder)})

    def below(self, folder: str) -> dict[str, float]:
        times: dict[str, float] = {}
        for disk in self.disks:
            times = disk.below(folder) | times
        return times

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects on all hosts that answer; the others' go when a run starts there."""
        self.own.delete(keys)
        for disk in self.disks[1:]:
            with suppress(OSError):
                disk.delete(keys)

    def check(self) -> None:
        """Write and delete a small object on all hosts."""
        key = f"{_EVERYWHERE}.check-{secrets.token_hex(8)}"
        with self._refused():
            for disk in self.disks:
                disk.create(key, b"here")
                if disk.read(key) != b"here":
                    raise OSError(f"{disk.name} does not give back what was written")
            for disk in self.disks:
                disk.delete([key])

    def check_readable(self) -> None:
        with self._refused():
            self.inside("commits")

    def _first(self, key: str, look: Callable[[Disk], T]) -> T:
        """Return what the first disk that has the object, undamaged, says.

        Where none has, a disk that does not answer may have it: that error is raised, if there is
        one.
        """
        silent: OSError | None = None
        damage: OSError | None = None
        damaged: list[Disk] = []
        for disk in self.disks:
            try:
                result = look(disk)
            except FileNotFoundError:
                continue
            except DamagedBytesError as error:  # another host may have it, too
                damage = error
                damaged.append(disk)
                continue
            except OSError as error:
                silent = error
                continue
            for other in damaged:
                self._tell(key, other, disk)
            if self.own in damaged:
                self._repair(key, disk)
            return result
        raise silent or damage or FileNotFoundError(f"there is no {self.url}/{key}")

    def _tell(self, key: str, damaged: Disk, taken: Disk) -> None:
        """Say once that the copy on a disk is damaged."""
        if (damaged.name, key) not in self._told:
            self._told.add((damaged.name, key))
            _log.warning(
                "warning: %s: %s is damaged on %s: the copy on %s is taken",
                self.url,
                key,
                damaged.name,
                taken.name,
            )

    def _repair(self, key: str, whole: Disk) -> None:
        """Write this host's copy anew, so that it is there when the other one is gone.

        A disk that refuses has cost a second copy, and nothing else.
        """
        try:
            self.own.repair(key, whole.read(key))
        except OSError as error:
            _log.warning("warning: %s: %s could not be repaired: %s", self.url, key, error)

    @contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{self.url} can't be used",
                where="checkpoint.storage",
                why=str(error),
                fix="name a folder on a disk of each host, which this user may write to",
            ) from None


def _place_of(disk: OwnDisk) -> tuple[str, int, int]:
    """Return what tells this disk's folder from those of other hosts."""
    disk.root.mkdir(parents=True, exist_ok=True)
    status = disk.root.stat()
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine = boot.read_text().strip() if boot.exists() else os.uname().nodename
    return machine, status.st_dev, status.st_ino
