"""What the system says of processes, from /proc (Linux).

Tests: tests/machine/test_processes.py, tests/failures/test_hang.py, tests/failures/test_stopped.py,
tests/verify/test_isolated.py
"""

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_TOGETHER_SECONDS = 0.01  # processes that die of one thing are seen together


def is_stopped(pid: int) -> bool:
    """Return whether any thread of the process is stopped.

    The main one may be in the kernel when the signal comes.
    """
    return any(_state(path) == "T" for path in Path(f"/proc/{pid}").glob("task/*"))


def is_running(pid: int) -> bool:
    """Return whether the process has not ended; a zombie has ended."""
    return _state(Path(f"/proc/{pid}")) not in ("", "Z", "X")


def wait_for_an_end(pids: Iterable[int], seconds: float) -> None:
    """Wait until one of the processes that run ends, for so many seconds at most.

    Where the system can't tell (Linux 5.3 can), for all of them.
    """
    ends = select.poll()  # of any number of descriptors, where select() takes those below 1,024
    with ExitStack() as stack:
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:  # it has ended, and somebody knows how
                continue
            except (AttributeError, OSError):
                time.sleep(seconds)
                return
            stack.callback(os.close, descriptor)
            ends.register(descriptor, select.POLLIN)
        if ends.poll(seconds * 1000):
            time.sleep(_TOGETHER_SECONDS)


def wants_processor(thread: int) -> bool:
    """Return whether a thread of this process, but for one, computes, waits to, or reads a disk.

    On a busy machine one that waits for its turn uses no processor either.
    """
    tasks = Path("/proc/self/task").glob("*")
    return any(_state(path) in ("R", "D") for path in tasks if path.name != str(thread))


def descendants(pid: int) -> Iterator[int]:
    """Yield the children of the process, and their children."""
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:
            continue  # the thread has ended
        for child in map(int, children):
            yield child
            yield from descendants(child)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process, which may have ended meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def core_seconds(pid: int) -> float:
    """Return the time for which the process has used cores; 0 if it has ended."""
    fields = _stat(Path(f"/proc/{pid}"))
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _state(process: Path) -> str:
    return (_stat(process) or [""])[0]


def _stat(process: Path) -> list[str]:
    """Return what /proc says of a process from its third field on (man 5 proc).

    Nothing if it has ended.
    """
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def die_with_this_process(number: int = signal.SIGKILL) -> None:
    """Ask the kernel to send this new process a signal when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
