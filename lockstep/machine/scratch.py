"""Creates temporary folders and files that are removed however the process ends.

The owner of each holds a kernel lock on a file beside it, also between containers that share the
folder; the next process removes what a killed process left, since nobody holds its lock.
"""

import atexit
import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

_OWNER = ".owner"
SHARED_MEMORY = Path("/dev/shm")  # a tmpfs, on Linux
_NEW_SECONDS = 10.0  # the owner of a newer lock may not have taken it yet
_owned: dict[Path, int] = {}  # path → descriptor that holds the lock
# the thread that ends the process waits for paths that are being created or removed
_changing = threading.RLock()


def scratch_folder(purpose: str, within: Path | None = None) -> Path:
    """Create a folder for temporary files, which only this user may enter.

    `remove` removes it, or the end of this process, or the next process that sweeps. `within` is
    SHARED_MEMORY, or None for the system's temporary folder.
    """
    sweep()
    prefix = f"lockstep-{purpose}-{os.getuid()}-"
    with _changing:
        return own(Path(tempfile.mkdtemp(prefix=prefix, dir=within)))


@contextmanager
def temporary(purpose: str) -> Iterator[Path]:
    """Create a folder for the length of the block."""
    folder = scratch_folder(purpose)
    try:
        yield folder
    finally:
        remove(folder)


def own(path: Path) -> Path:
    """Remove `path`, which need not exist yet, when this process ends; return it."""
    with _changing:
        if path not in _owned:
            handle = os.open(_lock_of(path), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _owned[path] = handle
    return path


def remove(path: Path) -> None:
    """Remove a path of this process."""
    with _changing:
        handle = _owned.pop(path, None)
        if handle is not None:
            _delete(path)
            os.close(handle)


@atexit.register
def remove_all() -> None:
    """Remove all paths of this process."""
    for path in list(_owned):
        remove(path)


def exit_now(code: int) -> NoReturn:
    """End this process without the interpreter's cleanup, but remove all its paths.

    Other threads create no more.
    """
    with _changing:
        remove_all()
        os._exit(code)


def sweep() -> None:
    """Remove what killed processes of this user left."""
    folder = Path(tempfile.gettempdir())
    pattern = f"lockstep-*-{os.getuid()}-*{_OWNER}"
    for lock in (*folder.glob(pattern), *SHARED_MEMORY.glob(pattern)):
        with suppress(OSError):
            if time.time() - lock.stat().st_mtime < _NEW_SECONDS:
                continue
            handle = os.open(lock, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _delete(lock.with_name(lock.name.removesuffix(_OWNER)))
            finally:
                os.close(handle)
    for mark in folder.glob(f"lockstep-failed-{os.getuid()}-*"):
        parent = re.match(r"(\d+)", mark.name.removeprefix(f"lockstep-failed-{os.getuid()}-"))
        if parent and not Path("/proc", parent[1]).exists():
            mark.unlink(missing_ok=True)


def _lock_of(path: Path) -> Path:
    return path.with_name(path.name + _OWNER)


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    _lock_of(path).unlink(missing_ok=True)


def _in_fork() -> None:
    """Drop the locks that a fork shares: it owns nothing, and must remove nothing at its end."""
    global _changing
    _changing = threading.RLock()  # another thread of the parent may have held it
    for handle in _owned.values():
        os.close(handle)
    _owned.clear()


os.register_at_fork(after_in_child=_in_fork)
