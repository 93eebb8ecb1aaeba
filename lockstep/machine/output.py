"""What a run says on standard output, however its program finds that stream.

It may be closed (a service), replaced by an object that only has `write` (a user's own log), a
terminal that is gone, a file on a full disk, or of an encoding without the signs of a message. None
of these ends a run: its records say the same. Does not import torch.

Tests: tests/machine/test_output.py
"""

import io
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
    if stream is None or getattr(stream, "closed", False):
        return
    try:
        stream.write(_in_encoding_of(stream, text))
        flush(stream)
    except OSError as error:
        if id(stream) in _failed:
            return
        _failed.add(id(stream))
        reason = error.strerror or type(error).__name__
        with suppress(OSError, ValueError, AttributeError):  # stderr may be closed, too
            sys.stderr.write(f"lockstep: warning: no output can be written ({reason}); go on\n")


def _in_encoding_of(stream: Any, text: str) -> str:
    """Return the text with escapes of Python for what a stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    if getattr(stream, "errors", "strict") != "strict":
        return text  # the stream knows what to do
    return text.encode(encoding, "backslashreplace").decode(encoding)


def flush(stream: Any) -> None:
    """Flush a stream; one that is closed, or that can't be flushed, is passed over."""
    flushes = getattr(stream, "flush", None)
    if flushes is not None and not getattr(stream, "closed", False):
        flushes()


def flush_both() -> None:
    """Flush standard output and error as far as they can be."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            flush(stream)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; one that is closed, or can't say so, is none."""
    asked = getattr(stream, "isatty", None)
    return asked is not None and not getattr(stream, "closed", False) and bool(asked())


def is_rewritable(stream: Any) -> bool:
    """Return whether a stream is a terminal that can rewrite a line."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def prepare_streams() -> None:
    """Make the streams of a command usable: open what is closed, and escape what can't be encoded.

    A closed descriptor is opened on nothing. Else the next file that is opened takes its number,
    and what a library of C or another process prints goes into it: a checkpoint, say.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(number, True)
            opened: Any = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
            setattr(sys, name, opened)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
