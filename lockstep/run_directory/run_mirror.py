"""Keeps a run directory in a bucket, beside the checkpoints that are there.

A run writes its records to a folder of this machine, as ever. Rank 0 copies what has changed to the
bucket every few seconds, and before each commit of a checkpoint, so that a checkpoint in the bucket
has the records up to its step beside it. Another machine with an empty disk fetches them first.

    PREFIX/records/metrics.jsonl              the first 8 MiB of the file
    PREFIX/records/metrics.jsonl.part-00001   the next …
    PREFIX/claims/00000003                    who writes to PREFIX: the newest of them

An object can't be appended to: of a file that grows, the last part is put again. Does not import
torch.

Tests: tests/run_directory/test_run_mirror.py
"""

import json
import os
import re
import secrets
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path, PurePosixPath

from lockstep.division import ceil_div
from lockstep.errors import LockstepError, RunError, UsageError
from lockstep.files.object_client import ObjectClient
from lockstep.run_directory.run_files import LeftOutError, open_file
from lockstep.run_directory.run_lock import FILE, Holder, holder_in
from lockstep.store_threads import StoreThread

PART_BYTES = 8 << 20
PUSH_SECONDS = 10.0
BEAT_SECONDS = 10.0
PATIENCE = 45.0  # seconds without a beat after which a run on another machine counts as dead
_LOOK = 1.0
_PART = re.compile(r"(.+)\.part-([0-9]{5})")
_NOT_COPIED = ("checkpoints", FILE)  # of the run directory; and whatever begins with a dot

Say = Callable[[str], object]


def local_folder(url: str) -> Path:
    """Return the folder of this machine where a run in a bucket writes: `runs/s3/BUCKET/PREFIX`."""
    scheme, _, rest = url.partition("://")
    parts = [part for part in rest.split("/") if part not in ("", ".", "..")]
    return Path("runs", scheme, *parts)


class RunMirror:
    """Copies the files of a run directory to a bucket, and back.

    Args:
        client: of the run's prefix.
        folder: the run directory on this machine.
        say: takes a line for the person who started the run.
        advance: is called after each part that is copied, as a sign of life.
    """

    def __init__(
        self,
        client: ObjectClient,
        folder: Path,
        say: Say = lambda _text: None,
        advance: Callable[[], object] = lambda: None,
    ) -> None:
        self._client = client
        self._folder = folder
        self._say = say
        self._advance = advance
        self._claim = Claim(client, say)
        self._sums: dict[str, int] = {}  # key → checksum of the object that is there
        self._seen: dict[str, tuple[int, int]] = {}  # file → its size and time when it was copied
        self._pushing = threading.Lock()
        self._thread: StoreThread | None = None

    def __str__(self) -> str:
        return self._client.url

    def acquire(self) -> None:
        """Claim the prefix for this process, fetch its records, and copy from now on."""
        if self._thread is not None:
            return
        self._claim.acquire()
        self.fetch()
        self._thread = StoreThread(self._go_on, "run-mirror")

    def check(self) -> None:
        """Raise an error if another run has taken the prefix over."""
        self._claim.check()

    def release(self) -> None:
        """Copy the last changes, and let others have the prefix."""
        if self._thread is None:
            return
        self._thread.closing.set()
        self._thread.join()
        self._thread = None
        self.push_or_say()
        self._claim.release()

    def fetch(self) -> bool:
        """Bring the folder to what the bucket has; return whether it has anything.

        A file that goes on from what the bucket has is kept, and so is a log, which may be open.
        """
        files = _files(self._client.below("records"))
        for name, keys in files.items():
            target = self._folder / name
            if name.startswith("logs/") and target.exists():
                continue
            beside = target.with_name(f".{target.name}.tmp-{secrets.token_hex(8)}")
            beside.parent.mkdir(parents=True, exist_ok=True)
            try:
                with beside.open("xb") as file:
                    for key in keys:
                        data = self._client.get(key)
                        self._sums[key] = zlib.crc32(data)
                        file.write(data)
                        self._advance()
                if not _goes_on_from(target, beside):
                    beside.replace(target)
            finally:
                beside.unlink(missing_ok=True)
        return bool(files)

    def publish(self, file: Path) -> str:
        """Copy one file of the folder to the bucket, whoever writes the run; return its URL."""
        name = file.relative_to(self._folder).as_posix()
        self._push_file(name)
        return f"{self}/records/{name}"

    def push(self) -> None:
        """Copy what has changed to the bucket. Raises OSError: the service refuses it."""
        with self._pushing:
            self._claim.check()
            kept = set()
            for name in _names(self._folder):
                kept |= self._push_file(name)
            # the last part of a file that was cut goes first: what is left is whole up to its end
            for key in sorted(self._sums.keys() - kept, reverse=True):
                self._client.delete([key])
                del self._sums[key]

    def push_late(self) -> None:
        """Copy what was written after the release, if no other run has begun since."""
        with suppress(OSError):
            if self._claim.is_newest():
                self.push_or_say()

    def push_or_say(self) -> None:
        """Copy what has changed; where that fails, say where the records are."""
        try:
            self.push()
        except (OSError, LockstepError) as error:
            what = error.what if isinstance(error, LockstepError) else str(error)
            self._say(f"warning: the records in {self._folder} are not all in {self}: {what}")

    def _push_file(self, name: str) -> set[str]:
        """Copy the parts of a file that have changed; return the keys of all its parts."""
        try:
            file = open_file(self._folder, *name.split("/"))
        except (FileNotFoundError, LeftOutError):  # it is gone meanwhile, or a link
            return set()
        with file:
            found = os.fstat(file.fileno())
            size = found.st_size
            keys = [_key(name, number) for number in range(max(1, ceil_div(size, PART_BYTES)))]
            seen = (size, found.st_mtime_ns)
            if self._seen.get(name) == seen:
                return set(keys)
            for key in keys:
                data = file.read(min(PART_BYTES, size))
                size -= len(data)
                crc = zlib.crc32(data)
                if self._sums.get(key) != crc:
                    self._client.put(key, data)
                    self._sums[key] = crc
                    self._advance()
        self._seen[name] = seen
        return set(keys)

    def _go_on(self, thread: StoreThread) -> None:
        """Copy until the run is released. A service that is down is asked again, in silence."""
        while not thread.closing.wait(PUSH_SECONDS):
            with suppress(OSError, RunError):
                self.push()


class Claim:
    """One writer at a time for a prefix, by numbered objects: who creates the next one has it.

    The holder rewrites its object every few seconds. One that does not is dead, and the next writer
    creates the next number, which only one can do. No clocks are compared.
    """

    def __init__(self, client: ObjectClient, say: Say = lambda _text: None) -> None:
        self._client = client
        self._say = say
        self._number = 0
        self._me: Holder | None = None
        self._lost: str | None = None
        self._thread: StoreThread | None = None

    def acquire(self) -> None:
        """Take the prefix, or raise a UsageError if another run has it."""
        self._me = me = Holder.this_process()
        self._lost = None
        while True:
            number = self._newest()
            if number:
                self._refuse_if_alive(number, me)
            try:
                self._client.put_new(_claim_key(number + 1), _as_json(me))
            except FileExistsError:  # another one was faster, and is looked at
                continue
            break
        self._number = number + 1
        self._client.delete([key for key in self._keys() if key < _claim_key(self._number)])
        self._thread = StoreThread(self._beat, "bucket-claim")

    def check(self) -> None:
        """Raise a RunError if another run has taken the prefix over."""
        if self._lost is not None:
            raise RunError(
                f"another run has taken over {self._client.url}: {self._lost}",
                why=f"this one gave no sign of life for {PATIENCE:g} s",
                fix="let the other one go on, or end it and start this one again",
            )

    def release(self) -> None:
        """Let the next run take the prefix without waiting."""
        if self._thread is None:
            return
        self._thread.closing.set()
        self._thread.join()
        self._thread = None
        if self._lost is None:
            with suppress(OSError):
                self._client.put(_claim_key(self._number), b"{}")

    def is_newest(self) -> bool:
        """Return whether nobody has claimed the prefix since."""
        return self._newest() == self._number

    def is_of_this_machine(self) -> bool:
        """Return whether a process of this machine has, or had, the newest claim."""
        number = self._newest()
        holder = self._read(number) if number else None
        return holder is not None and holder.machine == Holder.this_process().machine

    def _refuse_if_alive(self, number: int, me: Holder) -> None:
        """Return once the holder of a claim is dead or has gone; raise a UsageError if it lives."""
        first = holder = self._read(number)
        begun = time.monotonic()
        while holder is not None:
            here = (holder.machine, holder.processes) == (me.machine, me.processes)
            if here and (holder.pid == me.pid or not holder.is_running):
                return
            if holder.launch and holder.launch == me.launch:  # an earlier attempt, which has ended
                return
            if here or (first is not None and holder.beat != first.beat):
                raise UsageError(
                    f"another run is writing to {self._client.url}: {holder}",
                    why="two runs in one prefix would overwrite each other's records",
                    fix="wait for it or end it; or give this one a prefix of its own with"
                    " --output-dir URL (in Python output_dir=…)",
                )
            if holder is first and time.monotonic() - begun < _LOOK:
                self._say(f"{holder} may still write to {self._client.url}: waits for a sign of it")
            if time.monotonic() - begun > PATIENCE:
                return
            time.sleep(_LOOK)
            holder = self._read(number)

    def _beat(self, thread: StoreThread) -> None:
        """Renew the claim until it is released, or another run has the next one."""
        assert self._me is not None
        beat = 0
        while not thread.closing.wait(BEAT_SECONDS):
            beat += 1
            with suppress(OSError):  # a service that is down for a while
                if self._client.exists(_claim_key(self._number + 1)):
                    self._lost = str(self._read(self._number + 1) or "it has ended since")
                    return
                renewed = Holder(**{**asdict(self._me), "beat": beat})
                self._client.put(_claim_key(self._number), _as_json(renewed))

    def _keys(self) -> list[str]:
        return [f"claims/{name}" for name in self._client.inside("claims") if name.isdecimal()]

    def _newest(self) -> int:
        return max((int(key.rpartition("/")[2]) for key in self._keys()), default=0)

    def _read(self, number: int) -> Holder | None:
        """Return the holder of a claim; None if it was released."""
        with suppress(FileNotFoundError):  # the next holder has deleted it
            return holder_in(self._client.get(_claim_key(number)))
        return None


def push_after_ranks(client: ObjectClient, folder: Path) -> None:
    """Copy what dead ranks left, with their logs, unless another machine has the run by now."""
    mirror = RunMirror(client, folder)
    if Claim(client).is_of_this_machine():
        mirror.push()


def _claim_key(number: int) -> str:
    return f"claims/{number:08d}"


def _as_json(holder: Holder) -> bytes:
    return json.dumps(asdict(holder), sort_keys=True).encode()


def _key(name: str, number: int) -> str:
    return f"records/{name}.part-{number:05d}" if number else f"records/{name}"


def _files(keys: dict[str, float]) -> dict[str, list[str]]:
    """Return the files that objects are the parts of, with their keys in order.

    A name that would lead out of the folder is left out: the bucket may be a stranger's.
    """
    found: dict[str, list[str]] = {}
    for key in sorted(keys):
        name = key.removeprefix("records/")
        match = _PART.fullmatch(name)
        name = name if match is None else match[1]
        if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name:
            continue
        if PurePosixPath(name).parts[0] not in _NOT_COPIED:
            found.setdefault(name, []).append(key)
    return found


def _names(folder: Path) -> Iterator[str]:
    """Yield the names of the ordinary files in a folder that are copied, in order.

    Raise an OSError if they can't be listed: what is missing is deleted from the bucket.
    """
    for root, folders, files in os.walk(folder, onerror=_refuse_unless_gone):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        place = Path(root).relative_to(folder)
        if not place.parts:
            folders[:] = [name for name in folders if name not in _NOT_COPIED]
        for name in sorted(files):
            path = place / name
            if name.startswith(".") or path.as_posix() in _NOT_COPIED:
                continue
            with suppress(FileNotFoundError):
                if stat.S_ISREG(os.lstat(folder / path).st_mode):
                    yield path.as_posix()


def _refuse_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _goes_on_from(target: Path, earlier: Path) -> bool:
    """Return whether a file begins with all that another one holds."""
    try:
        with target.open("rb") as longer, earlier.open("rb") as shorter:
            while piece := shorter.read(1 << 20):
                if longer.read(len(piece)) != piece:
                    return False
    except FileNotFoundError:
        return False
    return True
