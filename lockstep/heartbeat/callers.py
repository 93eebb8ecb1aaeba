"""The line of the user's code that made a call, or in which torch's collective failed.

Tests: tests/failures/test_hang.py, tests/failures/test_only_some.py
"""

import contextlib
import functools
import os
import sys
import threading
import traceback
from pathlib import Path

from lockstep.errors import only_user_code
from lockstep.heartbeat.files import Call

_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_COLLECTIVES = os.path.join("torch", "distributed", "distributed_c10d.py")
_TORCH = f"{os.sep}torch{os.sep}"
_ANY_COLLECTIVE = "a collective"
_NOBODYS = (_PACKAGE, "<frozen ", functools.__file__, contextlib.__file__)


def callers_line() -> str:
    """Return the innermost line outside of Lockstep that led here; "" if there is none."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_NOBODYS):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def collective_of(error: BaseException) -> Call:
    """Return torch's collective that raised the error, with the user's line that called it."""
    frames = list(traceback.walk_tb(error.__traceback__))
    users = {frame for frame, _ in traceback.walk_tb(only_user_code(error.__traceback__))}
    last = max((index for index, (frame, _) in enumerate(frames) if frame in users), default=None)
    if last is None:
        return Call(0, _ANY_COLLECTIVE, "", 0.0, 0.0)
    called = [frame.f_code for frame, _ in frames[last + 1 :]]
    if called and called[0].co_filename.startswith(_PACKAGE):
        called = []  # the collective is one of Lockstep's own
    names = (
        f"torch.distributed.{code.co_name}"
        for code in called
        if code.co_filename.endswith(_COLLECTIVES)
    )
    frame, line = frames[last]
    return Call(
        0, next(names, _ANY_COLLECTIVE), f"{shown(frame.f_code.co_filename)}:{line}", 0.0, 0.0
    )


def collective_under_way() -> str | None:
    """Return the collective in which this process's main thread is, and the user's line.

    None if it is in none. Any thread may ask.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    name = None
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_COLLECTIVES):
            name = f"torch.distributed.{code.co_name}"
        elif name is not None and code.co_filename.startswith(_PACKAGE):
            name = _ANY_COLLECTIVE  # one of Lockstep's own
        elif (
            name is not None
            and _TORCH not in code.co_filename
            and not code.co_filename.startswith(_NOBODYS)
        ):
            return f"{name} at {shown(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@functools.cache
def shown(path: str) -> str:
    """Return a path as errors show it: relative, where it is below the working directory."""
    try:
        return os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else path
    except FileNotFoundError:  # the working directory is gone
        return path
