"""Sends a rank's output to its log file, and rank 0's also to the console.

Started ranks redirect the file descriptors themselves, so that the log also has the output of C libraries and of a
crash. Rank 0's Python streams also go to the console, through `Tee`, whose `isatty` is the console's.
"""

import io
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from lockstep.errors import UsageError

_copiers: list[subprocess.Popen[bytes]] = []  # they end when nobody writes to them any more
_VARIABLE = "LOCKSTEP_CONSOLE_OUTPUT"  # carries `ConsoleOutput` from the launcher to its ranks


@dataclass(frozen=True)
class ConsoleOutput:
    """Which ranks' output the console shows: rank 0's, unless torchrun's options change that.

    Attributes:
        tee, redirects: streams to show, and to hide: 0 none, 1 stdout, 2 stderr, 3 both, of all local ranks or, as
            `0:3,1:2`, of some.
        only: local ranks, as `0,2`; empty: rank 0 alone.
    """

    tee: str = "0"
    redirects: str = "0"
    only: str = ""

    def check(self) -> None:
        """Check the options.

        Raises:
            UsageError: naming the option that cannot be parsed.
        """
        _streams_of("--tee", self.tee, 0)
        _streams_of("--redirects", self.redirects, 0)
        if not re.fullmatch(r"(\d+(,\d+)*)?", self.only):
            raise UsageError(f"--local-ranks-filter {self.only} is not a list of local ranks, as 0,2")

    def streams(self, local_rank: int, *, is_main: bool) -> tuple[bool, bool]:
        """Return whether a rank's stdout and its stderr are shown."""
        shown = str(local_rank) in self.only.split(",") if self.only else is_main
        bits = 3 * shown | _streams_of("--tee", self.tee, local_rank)
        bits &= ~_streams_of("--redirects", self.redirects, local_rank)
        return bool(bits & 1), bool(bits & 2)

    def environment(self) -> dict[str, str]:
        """Return the environment variable that carries these options to the ranks."""
        return {_VARIABLE: "|".join((self.tee, self.redirects, self.only))}

    @classmethod
    def from_environment(cls) -> "ConsoleOutput":
        """Return the launcher's options for this rank, and remove the variable from the environment."""
        text = os.environ.pop(_VARIABLE, None)
        return cls() if text is None else cls(*text.split("|"))


def _streams_of(option: str, text: str, local_rank: int) -> int:
    if re.fullmatch("[0-3]", text):
        return int(text)
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise UsageError(
            f"{option} {text} can't be read",
            where=option,
            fix=f"{option} 3 for stdout and stderr of all ranks (1: stdout, 2: stderr), or by local rank: 0:3,1:2",
        )
    pairs = dict(pair.split(":") for pair in text.split(","))
    return int(pairs.get(str(local_rank), 0))


class Tee(io.TextIOBase):
    """Writes text to the console and to the log.

    If one of them cannot be written any more (a full disk, a closed terminal), the program goes on with the other and
    writes one warning there.

    Attributes:
        console: the stream that people see; a live display may replace it for a while.
        log: the stream of the log file.
    """

    def __init__(self, console: TextIO, log: TextIO) -> None:
        self.console, self.log = console, log
        self._failed: set[str] = set()

    def write(self, text: str) -> int:
        """Write to both."""
        self._try("log", lambda: self.log.write(text))
        self._try("console", lambda: self.console.write(text))
        return len(text)

    def write_to_log(self, text: str) -> bool:
        """Write to the log alone, and return whether that worked; a failure is not reported."""
        try:
            self.log.write(text)
        except OSError:
            self._failed.add("log")
            return False
        return True

    def flush(self) -> None:
        """Flush both."""
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
        """Return whether the console is a terminal."""
        return self.console.isatty()

    def fileno(self) -> int:
        """Return the console's file descriptor."""
        return self.console.fileno()

    def writable(self) -> bool:
        """Return True."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The console's encoding."""
        return self.console.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """The console's error handling."""
        return self.console.errors


def console(stream: Any = None) -> TextIO:
    """Return the stream that people see, without the log: for text that should not be logged, or is logged already."""
    stream = sys.stderr if stream is None else stream
    seen: TextIO = getattr(stream, "console", stream)
    return seen


@contextmanager
def to_log(
    path: Path, *, on_console: tuple[bool, bool], descriptors: bool, include_children: bool = False
) -> Iterator[Tee]:
    """Send this process's output to `path` (appended) until the end of the block.

    Args:
        path: the log file; its folder is made.
        on_console: whether to show stdout and stderr on the console as well.
        descriptors: redirect file descriptors 1 and 2 themselves, not only Python's streams.
        include_children: also show the output of child processes, and of C libraries.

    Yields:
        the stream that replaces `sys.stderr` in the block.
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
        for number, seen, shown in zip((1, 2), saved, on_console, strict=True):
            copied = _copier(path, seen) if shown and include_children else None
            os.dup2(handle if copied is None else copied, number)
            if copied is not None:
                os.close(copied)
    log = open(handle, "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    # Hidden ranks keep access to the console for the one message of a failure: `console()`.
    pairs = [(Tee if shown else _LogOnly)(seen, log) for seen, shown in zip(consoles, on_console, strict=True)]
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
        with suppress(OSError):  # the disk is full: a warning was written when the log first failed
            log.close()


def _copier(path: Path, console: int) -> int:
    """Start a process that copies its input to the log and to the console; return the descriptor to write to.

    It is a process and not a thread, so that it still copies the last output of a crash.
    """
    read, write = os.pipe()
    copier = subprocess.Popen(
        ["tee", "-a", str(path)], stdin=read, stdout=console, stderr=subprocess.DEVNULL, start_new_session=True
    )
    os.close(read)
    _copiers.append(copier)
    return write


class _LogOnly(Tee):
    def write(self, text: str) -> int:
        self._try("log", lambda: self.log.write(text))
        return len(text)

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.log.fileno()
