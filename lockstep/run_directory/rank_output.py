"""Sends what a rank prints to its log, and to the console if people are to see it.

    to_log      sends a process's output to its log, and to the console as well where it is shown
    console     what people see, without the log
    show_output shows a rank's output from now on

Tests: tests/launch/test_local.py, tests/launch/test_torchrun.py
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

from lockstep.errors import LockstepError, UsageError
from lockstep.machine.output import flush_both
from lockstep.run_directory.run_files import open_to_append, printable

_copiers: list[subprocess.Popen[bytes]] = []  # they end when nobody writes to them any more
_VARIABLE = "LOCKSTEP_CONSOLE_OUTPUT"  # carries `ConsoleOutput` from the launcher to its ranks


@dataclass(frozen=True)
class ConsoleOutput:
    """The choice of ranks whose output the console shows.

    It is rank 0, unless torchrun's options change that.
    """

    # streams to show: 0 none, 1 stdout, 2 stderr, 3 both, of all local ranks or, as `0:3,1:2`, of
    # some
    tee: str = "0"
    redirects: str = "0"  # streams to hide, written alike
    only: str = ""  # local ranks, as `0,2`; empty: rank 0 alone

    def check(self) -> None:
        """Raise UsageError if an option cannot be parsed."""
        _streams_of("--tee", self.tee, 0)
        _streams_of("--redirects", self.redirects, 0)
        if not re.fullmatch(r"(\d+(,\d+)*)?", self.only):
            raise UsageError(
                f"--local-ranks-filter {self.only} is not a list of local ranks",
                fix="write their numbers on this machine, as --local-ranks-filter 0,2",
            )

    def streams(self, local_rank: int, *, is_main: bool) -> tuple[bool, bool]:
        """Return whether a rank's stdout and its stderr are shown."""
        shown = str(local_rank) in self.only.split(",") if self.only else is_main
        bits = 3 * shown | _streams_of("--tee", self.tee, local_rank)
        bits &= ~_streams_of("--redirects", self.redirects, local_rank)
        return bool(bits & 1), bool(bits & 2)

    def environment(self) -> dict[str, str]:
        """Return the variable that carries the choice to the ranks."""
        return {_VARIABLE: "|".join((self.tee, self.redirects, self.only))}

    @classmethod
    def from_environment(cls) -> "ConsoleOutput":
        """Return the choice that a launcher has made, and remove it from the environment."""
        text = os.environ.pop(_VARIABLE, None)
        return cls() if text is None else cls(*text.split("|"))


def _streams_of(option: str, text: str, local_rank: int) -> int:
    if re.fullmatch("[0-3]", text):
        return int(text)
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        fix = (
            f"{option} 3 for stdout and stderr of all ranks (1: stdout, 2: stderr), or by local"
            " rank: 0:3,1:2"
        )
        raise UsageError(f"{option} {text} can't be read", where=option, fix=fix)
    pairs = dict(pair.split(":") for pair in text.split(","))
    return int(pairs.get(str(local_rank), 0))


class Tee(io.TextIOBase):
    """Writes text to the log, and to the console if `shown`.

    A hidden rank keeps it for the one message of a failure.

    If one of them cannot be written any more (a full disk, a closed terminal), the program goes on
    with the other and writes one warning there. A live display may replace the console for a while.
    """

    def __init__(self, console: TextIO, log: TextIO, shown: bool = True) -> None:
        self.console = console
        self.log = log
        self.shown = shown
        self._failed: set[str] = set()

    def write(self, text: str) -> int:
        """Write to the log, and to the console if it is shown."""
        self._try("log", lambda: self.log.write(text))
        if self.shown:
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
        """Write to the log or the console; tell the other of the first error, and go on."""
        try:
            call()
        except OSError as error:
            if which in self._failed:
                return
            self._failed.add(which)
            other = self.console if which == "log" else self.log
            with suppress(OSError):
                other.write(
                    f"lockstep: warning: the {which} can't be written, training goes on:"
                    f" {error.strerror}\n"
                )

    def isatty(self) -> bool:
        """Return whether people see the text on a terminal."""
        return self.shown and self.console.isatty()

    def fileno(self) -> int:
        """Return the descriptor of the console where it is shown, else of the log."""
        return (self.console if self.shown else self.log).fileno()

    def writable(self) -> bool:
        """Return True, as `io` asks of a stream."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The console's encoding."""
        return self.console.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """Name what the console does with signs that its encoding lacks."""
        return self.console.errors


def console(stream: Any = None) -> TextIO:
    """Return the stream that people see, without the log.

    It is for text that should not be logged, or is logged already.
    """
    stream = sys.stderr if stream is None else stream
    seen: TextIO = getattr(stream, "console", stream)
    return seen


def show_output() -> None:
    """Show this process's output on the console, too, from now on: it has become rank 0."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, Tee):
            stream.shown = True


@contextmanager
def to_log(
    path: Path, *, on_console: tuple[bool, bool], descriptors: bool, include_children: bool = False
) -> Iterator[Tee]:
    """Send this process's output to `path` (appended) until the end of the block.

    Yield what replaces `sys.stderr`.

    Args:
        path: the log.
        on_console: whether to show stdout, and stderr, on the console as well.
        descriptors: redirect 1 and 2 themselves, not only Python's streams.
        include_children: show the output of child processes, and of C libraries, too.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = open_to_append(path)
    before = sys.stdout, sys.stderr
    as_text: Any = {"buffering": 1, "encoding": "utf-8", "errors": "backslashreplace"}
    saved: list[int] = []
    consoles: list[TextIO] = [*before]
    flush_both()
    if descriptors:
        saved = [os.dup(1), os.dup(2)]
        consoles = [open(fd, "w", closefd=False, **as_text) for fd in saved]  # noqa: SIM115
        for number, seen, shown in zip((1, 2), saved, on_console, strict=True):
            if shown and include_children:
                _copy(number, path, seen)
            else:
                os.dup2(handle, number)
    log = open(handle, "w", **as_text)  # noqa: SIM115
    pairs = [Tee(seen, log, shown) for seen, shown in zip(consoles, on_console, strict=True)]
    sys.stdout, sys.stderr = pairs
    try:
        yield pairs[1]
    finally:
        for pair in pairs:
            # flushes; an open one would be flushed again when it is deleted, after its log is
            # closed
            pair.close()
        sys.stdout, sys.stderr = before
        for fd, number in zip(saved, (1, 2), strict=False):
            os.dup2(fd, number)
            os.close(fd)
        with suppress(OSError):  # the disk is full: a warning was written when the log first failed
            log.close()


def _copy(descriptor: int, path: Path, console: int) -> None:
    """Have what is written to a descriptor copied to a file and to the console's descriptor.

    A process copies, not a thread: it still copies the last output of a crash.
    """
    read, write = os.pipe()
    copier = subprocess.Popen(
        ["tee", "-a", str(path)],
        stdin=read,
        stdout=console,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    _copiers.append(copier)
    os.dup2(write, descriptor)
    os.close(read)
    os.close(write)


def print_error(error: LockstepError, trace: str = "") -> None:
    """Print the message to the console, but not to the log."""
    stream = console(sys.stderr)
    if os.environ.get("LOCKSTEP_TRACEBACK") == "1" and trace:
        stream.write(trace)
    stream.write(f"lockstep: {printable(str(error))}\n")
    stream.flush()
