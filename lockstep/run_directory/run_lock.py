"""Allows one run at a time in a run directory, by `lock.json`, which names the run that holds it.

The holder keeps a POSIX lock on the file (fcntl(2), F_SETLK), which is released when the process
dies. Some shared file systems have no such locks, or keep them on one machine only, and a server
may keep the lock of a machine that is gone. The file therefore also names its holder, which
rewrites it every few seconds: a run on another machine is alive if the file changes meanwhile.
Clocks are not compared. Does not import torch.
"""

import fcntl
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from lockstep.errors import RunError, UsageError

FILE = "lock.json"
# set by launchers of several machines: the same for all ranks that they ever start
LAUNCH = "LOCKSTEP_LAUNCH"
BEAT_SECONDS = 3.0
PATIENCE = 15.0  # seconds without a beat after which a run on another machine counts as dead
_DYING = 3.0  # seconds that a killed process may take to release its lock
_LOOK = 0.2
_SIZE = 1024  # bytes of the file, constant, so that a beat needs no space on a full disk

# Locks of this process: a second open and close of the file would unlock it.
_held: dict[tuple[int, str], "RunLock"] = {}


@dataclass(frozen=True)
class Holder:
    """A process that holds, or held, the lock."""

    host: str
    pid: int
    machine: str  # identity of its boot; processes with the same one share a kernel
    processes: str  # its namespace of process ids; processes with the same one see each other
    started: str  # start of the process, in the kernel's ticks
    since: float  # when it took the lock, in seconds since the Unix epoch
    launch: str  # a digest of `LAUNCH`; empty without it
    token: str
    beat: int = 0  # grows while the process lives

    @classmethod
    def this_process(cls) -> "Holder":
        """Return a holder for this process."""
        host = socket.gethostname()
        machine = _text("/proc/sys/kernel/random/boot_id") or host
        processes = host
        pid = os.getpid()
        with suppress(OSError):
            processes = os.readlink("/proc/self/ns/pid")
        launch = os.environ.get(LAUNCH, "")
        launch = hashlib.sha256(launch.encode()).hexdigest()[:16] if launch else ""
        return cls(
            host, pid, machine, processes, _started(pid), time.time(), launch, secrets.token_hex(8)
        )

    @property
    def is_running(self) -> bool:
        """Return whether the process lives on this machine.

        One that was killed with its parent may stay as a zombie for as long as nobody waits for it,
        in a container whose first process does not.
        """
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return _started(self.pid) == self.started and not _is_zombie(self.pid)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        return f"process {self.pid} on {self.host}, since {since}"


class RunLock:
    """The lock of one run directory, which is created, for the process that writes it (rank 0).

    `say` is called with a line if a run on another machine has to be waited for.
    """

    def __init__(self, directory: Path, say: Callable[[str], object] = lambda _text: None) -> None:
        self._path = directory / FILE
        self._say = say
        self._handle: int | None = None
        self._me: Holder | None = None
        self._lost: Holder | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lock, or raise a UsageError; nothing happens if this process has it."""
        if (os.getpid(), self._key) in _held:
            return
        self._me = Holder.this_process()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = self._take(self._me)
        except OSError as error:
            what = f"the run directory {self._path.parent} can't be locked"
            fix = "choose another with --output-dir DIR (in Python output_dir=…)"
            raise UsageError(what, where=str(self._path), why=error.strerror, fix=fix) from None
        _held[os.getpid(), self._key] = self
        self._ended.clear()
        self._thread = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise a RunError if another run has taken over because it took this one for dead."""
        if self._lost is not None:
            what = f"another run has taken over {self._path.parent}: {self._lost}"
            why = f"this one gave no sign of life for {PATIENCE:g} s"
            raise RunError(
                what, why=why, fix="let the other one go on, or end it and start this one again"
            )

    def release(self) -> None:
        """Release the lock; nothing happens if this object does not have it."""
        if _held.get((os.getpid(), self._key)) is not self or self._handle is None:
            return
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with suppress(OSError):
            if self._lost is None:
                _write(self._handle, None)
        os.close(self._handle)
        self._handle = None
        del _held[os.getpid(), self._key]

    @property
    def _key(self) -> str:
        return os.path.realpath(self._path)

    def _take(self, me: Holder) -> int:
        """Open and lock the file, once nobody else has it, and write the holder to it."""
        begun = time.monotonic()
        first = None
        while True:
            handle = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
            try:
                locked = _lock(handle)
                holder = _read(handle)
                waited = time.monotonic() - begun
                if holder is not None and _is_elsewhere(holder, me, locked):
                    if first is None:
                        first = holder
                        wait = f"looking for up to {PATIENCE:g} s whether it is alive"
                        self._say(f"{self._path.parent} is that of {holder}: {wait}")
                    if (holder.token, holder.beat) != (first.token, first.beat):
                        raise _refusal(self._path.parent, holder)
                    if waited > PATIENCE and locked is False and _is_at(handle, self._path):
                        # a server keeps the lock of a machine that is gone: use a new file
                        self._path.unlink()
                        begun = time.monotonic()
                        first = None
                    free = waited > PATIENCE and locked is not False
                else:
                    free = locked or (locked is None and (holder is None or not holder.is_running))
                    if not free and waited > _DYING:
                        raise _refusal(self._path.parent, holder)
                if free and _is_at(handle, self._path):
                    _write(handle, me)
                    # without kernel locks, the last of several writers has the lock
                    if locked is None:
                        time.sleep(5 * _LOOK)
                    found = None if locked is not None else _read(handle)
                    if locked is not None or (found is not None and found.token == me.token):
                        return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)
            time.sleep(_LOOK)

    def _beat(self) -> None:
        """Renew the lock's time in a thread, until it is released or another process has it."""
        assert self._me is not None
        assert self._handle is not None
        beat = 0
        while not self._ended.wait(BEAT_SECONDS):
            beat += 1
            with suppress(OSError):  # a file system that is temporarily unavailable
                # Opening the locked file again and closing it would release the lock: its handle is
                # read.
                if _is_at(self._handle, self._path):
                    holder = _read(self._handle)
                else:
                    other = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                    try:
                        holder = _read(other)
                    finally:
                        os.close(other)
                if holder is not None and holder.token != self._me.token:
                    self._lost = holder
                    return
                _write(self._handle, Holder(**{**asdict(self._me), "beat": beat}))


def require_free(directory: Path) -> None:
    """Raise a UsageError if a run on this machine has it, before ranks start.

    Only taking the lock shows the others.
    """
    path = directory / FILE
    if (os.getpid(), os.path.realpath(path)) in _held:
        return
    begun = time.monotonic()
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return
        try:
            holder = _read(handle) if _lock(handle) is False else None
        finally:
            os.close(handle)
        if holder is None or holder.machine != Holder.this_process().machine:
            return
        if time.monotonic() - begun > _DYING:
            raise _refusal(directory, holder)
        time.sleep(_LOOK)


def holder_in(text: bytes) -> Holder | None:
    """Return the holder that a lock's text names; None without a valid one."""
    try:
        content: Any = json.loads(text)
        return Holder(**{field.name: field.type(content[field.name]) for field in fields(Holder)})  # type: ignore[operator]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _refusal(directory: Path, holder: Holder | None) -> UsageError:
    who = "another process" if holder is None else str(holder)
    why = "two runs in one run directory would overwrite each other's checkpoints and metrics"
    fix = (
        "wait for it or end it; or give this one a folder of its own with --output-dir DIR (in"
        " Python output_dir=…)"
    )
    return UsageError(
        f"another run is writing to {directory}: {who}",
        where=str(directory / FILE),
        why=why,
        fix=fix,
    )


def _is_elsewhere(holder: Holder, me: Holder, locked: bool | None) -> bool:
    """Return whether only the holder's beats can show that it is alive."""
    if holder.launch and holder.launch == me.launch:
        # an earlier attempt of this launch, which has ended
        return locked is False and holder.machine != me.machine
    if locked is None:
        return (holder.machine, holder.processes) != (me.machine, me.processes)
    return holder.machine != me.machine


def _lock(handle: int) -> bool | None:
    """Return whether this process now has the lock on the file.

    None if the file system has no locks.
    """
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return None
    return True


def _write(handle: int, holder: Holder | None) -> None:
    text = "{}" if holder is None else json.dumps(asdict(holder))
    os.pwrite(handle, text.encode().ljust(_SIZE - 1) + b"\n", 0)
    os.ftruncate(handle, _SIZE)
    os.fsync(handle)


def _read(handle: int) -> Holder | None:
    """Return the holder in the file; None without a valid one."""
    return holder_in(os.pread(handle, _SIZE, 0))


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _started(pid: int) -> str:
    fields_of = _stat_fields(pid)
    return fields_of[19] if len(fields_of) > 19 else ""


def _is_zombie(pid: int) -> bool:
    return _stat_fields(pid)[:1] in (["Z"], ["X"])


def _stat_fields(pid: int) -> list[str]:
    """Return what the kernel says of a process after its name: its state first."""
    return _text(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
