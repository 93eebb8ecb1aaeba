"""Work on a file that nobody vouches for, in a process of its own with little memory and time.

A template can ask for any amount of either: `'x' * 10**12`, loops inside loops. No list of forbidden operations is
whole, so the system sets the limits.
"""

import os
import pickle
import resource
import selectors
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

from lockstep.errors import UsageError

T = TypeVar("T")

SECONDS = 10  # of computing; rendering takes milliseconds
WALL_SECONDS = 120  # on a machine that is very busy
MEMORY_BYTES = 1 << 29  # over what the process has
RESULT_BYTES = 10_000_000
_NO_MEMORY = 3


def within_limits(work: Callable[[], T], what: str) -> T:
    """`work()`, done by a child of this process; the result, or the error that a user is told, must pickle.

    Args:
        work: touches neither devices nor other threads.
        what: the file that it is about, for messages.

    Raises:
        UsageError: as `work` raises it, or because a limit was met.
    """
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        _work(work, writes)
    os.close(writes)
    data, status = b"", signal.SIGKILL.value
    try:
        data, ended = _all_of(reads)
        if ended:  # how is told by its status, which a signal that reaches it now would change
            _, status = os.waitpid(child, 0)
            child = 0
    finally:
        os.close(reads)
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not data:
        told = f"time (more than {SECONDS} s)" if os.WIFSIGNALED(status) else "memory"
        raise _too_much(what, told)
    if len(data) > RESULT_BYTES:
        raise _too_much(what, f"text (more than {RESULT_BYTES // 10**6} MB)")
    ended_well, value = pickle.loads(data)  # our own child wrote it
    if not ended_well:
        raise value
    return value  # type: ignore[no-any-return]


def _too_much(what: str, of: str) -> UsageError:
    return UsageError(
        f"the template takes too much {of}",
        where=what,
        why="a config is some pages of text: a loop or an expression in it grows without end",
        fix="mend its loops (`-- for`), repetitions (`*`) and macros that call themselves",
    )


def _work(work: Callable[[], object], writes: int) -> NoReturn:
    """What the child does; it leaves nothing behind, and runs no exit handlers of its parent."""
    code = _NO_MEMORY
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        for limit, value in (
            (resource.RLIMIT_AS, used + MEMORY_BYTES), (resource.RLIMIT_CPU, SECONDS), (resource.RLIMIT_CORE, 0),
        ):  # fmt: skip
            resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
        with os.fdopen(writes, "wb") as pipe:
            pipe.write(_answer(work)[: RESULT_BYTES + 1])
        code = 0
    finally:
        os._exit(code)


def _answer(work: Callable[[], object]) -> bytes:
    """What came of it, or the error; a lack of memory is told by the exit code."""
    try:
        return pickle.dumps((True, work()))
    except MemoryError:
        raise
    except Exception as error:
        return pickle.dumps((False, error))


def _all_of(reads: int) -> tuple[bytes, bool]:
    """Return what the child writes until it ends, or until its time is over, and whether it has ended."""
    deadline = time.monotonic() + WALL_SECONDS
    parts: list[bytes] = []
    with selectors.DefaultSelector() as selector:
        selector.register(reads, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            part = os.read(reads, 1 << 20)
            if not part:
                return b"".join(parts), True
            parts.append(part)
    return b"", False
