"""Where a rank's output goes: everything to its log file, rank 0's also to the console.

Ranks that a launcher started write to the file at the level of file descriptors, so that what libraries in C print and
what a crash prints last is in the log. Rank 0's Python streams also go to the console, as `Tee`, which still tells that
it is a terminal where it is one.
"""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO


class Tee(io.TextIOBase):
    """A text stream that writes to the console and to the log.

    Neither stops the program when it can't be written any more (a full disk, a terminal that was closed): the other
    goes on, and is told so once.

    Attributes:
        console: the stream that people see; a live display may put itself in its place for a while.
        log: the stream of the log file.
    """

    def __init__(self, console: TextIO, log: TextIO) -> None:
        self.console, self.log = console, log
        self._failed: set[str] = set()

    def write(self, text: str) -> int:
        self._try("log", lambda: self.log.write(text))
        self._try("console", lambda: self.console.write(text))
        return len(text)

    def write_to_log(self, text: str) -> bool:
        """Write to the log alone, and return whether it took the text; a refusal is not reported."""
        try:
            self.log.write(text)
        except OSError:
            self._failed.add("log")
            return False
        return True

    def flush(self) -> None:
        self._try("log", self.log.flush)
        self._try("console", self.console.flush)

    def _try(self, which: str, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            if which in self._failed:
                return
            self._failed.add(which)
            other = self.console if which == "log" else self.log
            with suppress(OSError):
                other.write(f"lockstep: warning: the {which} can't be written, training goes on: {error.strerror}\n")

    def isatty(self) -> bool:
        return self.console.isatty()

    def fileno(self) -> int:
        return self.console.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.console.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.console.errors


def console(stream: Any = None) -> TextIO:
    """The stream that people see, past the log: for what should not be in the log, or is there already."""
    stream = sys.stderr if stream is None else stream
    seen: TextIO = getattr(stream, "console", stream)
    return seen


@contextmanager
def to_log(path: Path, *, on_console: bool, descriptors: bool) -> Iterator[Tee]:
    """Send this process's output to `path` (appended to) until the end of the block.

    Yields:
        what stands for `sys.stderr` in the block.

    Args:
        path: the log file; its folder is made.
        on_console: also show it where it went before.
        descriptors: take over file descriptors 1 and 2 themselves, not only Python's streams.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    before = sys.stdout, sys.stderr
    saved: list[int] = []
    consoles: tuple[TextIO, TextIO] = before
    for stream in before:
        stream.flush()
    if descriptors:
        saved = [os.dup(1), os.dup(2)]
        consoles = tuple(  # type: ignore[assignment]
            open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            for fd in saved
        )
        os.dup2(handle, 1)
        os.dup2(handle, 2)
    log = open(handle, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    # Ranks that don't show keep a way to the console for the one message of a failure: `console()`.
    pairs = [Tee(seen, log) if on_console else _LogOnly(seen, log) for seen in consoles]
    sys.stdout, sys.stderr = pairs
    try:
        yield pairs[1]
    finally:
        for pair in pairs:
            pair.flush()
        sys.stdout, sys.stderr = before
        for fd, number in zip(saved, (1, 2), strict=False):
            os.dup2(fd, number)
            os.close(fd)
        with suppress(OSError):  # the disk is full: what the log could not take was said
            log.close()


class _LogOnly(Tee):
    def write(self, text: str) -> int:
        self._try("log", lambda: self.log.write(text))
        return len(text)

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.log.fileno()
