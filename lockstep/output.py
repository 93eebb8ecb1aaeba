"""What a run says on standard output, however its program finds that stream.

It may be closed (a service), replaced by an object that only has `write` (a user's own log), a
terminal that is gone, or a file on a full disk. None of these ends a run: its records say the same.
Does not import torch.

Tests: tests/test_output.py
"""

import os
import sys
from contextlib import suppress
from typing import Any

_failed: set[int] = set()  # ids of the streams whose failure was told


def say(*lines: str, prefix: str = "lockstep: ") -> None:
    """Write lines to standard output at once, each after a prefix."""
    write_out("".join(f"{prefix}{line}\n" for line in lines))


def write_out(text: str) -> None:
    """Write text to standard output at once; where that fails, tell stderr the first time."""
    stream = sys.stdout
    if stream is None:
        return
    try:
        stream.write(text)
        flush_of(stream)()
    except OSError as error:
        if id(stream) in _failed:
            return
        _failed.add(id(stream))
        reason = error.strerror or type(error).__name__
        with suppress(OSError, AttributeError):
            sys.stderr.write(f"lockstep: warning: no output can be written ({reason}); go on\n")


def flush_of(stream: Any) -> Any:
    """Return the stream's `flush`, or a function that does nothing where there is none."""
    return getattr(stream, "flush", None) or (lambda: None)


def flush_both() -> None:
    """Flush standard output and error, of which each may be closed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            flush_of(stream)()


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; one that can't say so is none."""
    asked = getattr(stream, "isatty", None)
    return bool(asked is not None and asked())


def is_rewritable(stream: Any) -> bool:
    """Return whether a stream is a terminal that can rewrite a line."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def open_what_is_closed() -> None:
    """Open standard input, output and error on nothing, where this process was given none.

    Else the next file that is opened takes their number, and what a library of C or another process
    prints goes into it: a checkpoint, say.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(number, True)
            opened: Any = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
            setattr(sys, name, opened)
