"""Runs code as a rank.

It dies with the launcher, writes to the log, and leaves a failure file for the launcher.

This works under every launcher. Lockstep's own launcher prints the one message; under torchrun,
srun, mpirun or none at all, the first rank of this machine to fail prints it. A rank's output goes
to its log file, and rank 0's also to the console. Started ranks redirect the file descriptors
themselves, so that the log has the output of C libraries, too.

Tests: tests/launch/test_local.py, tests/launch/test_ends.py, tests/faults/test_environment.py
"""

import faulthandler
import io
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from lockstep.errors import EXIT_DONE, EXIT_PREEMPTED, LockstepError, UsageError
from lockstep.heartbeat.files import FOLDER
from lockstep.launch.failures import Failure, done_mark, from_exception, preempted, stacks_file
from lockstep.launch.stacks import write_on_request
from lockstep.machine import cores, scratch, signals
from lockstep.machine.environment import RankFacts, parent_identity, rank_facts
from lockstep.machine.output import flush_both
from lockstep.machine.processes import die_with_this_process
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
                f"--local-ranks-filter {self.only} is not a list of local ranks, as 0,2"
            )

    def streams(self, local_rank: int, *, is_main: bool) -> tuple[bool, bool]:
        shown = str(local_rank) in self.only.split(",") if self.only else is_main
        bits = 3 * shown | _streams_of("--tee", self.tee, local_rank)
        bits &= ~_streams_of("--redirects", self.redirects, local_rank)
        return bool(bits & 1), bool(bits & 2)

    def environment(self) -> dict[str, str]:
        return {_VARIABLE: "|".join((self.tee, self.redirects, self.only))}

    @classmethod
    def from_environment(cls) -> "ConsoleOutput":
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
        return self.shown and self.console.isatty()

    def fileno(self) -> int:
        return (self.console if self.shown else self.log).fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.console.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
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

    `on_console`: whether to show stdout and stderr there as well; `descriptors`: redirect 1 and 2
    themselves, not only Python's streams; `include_children`: also show the output of child
    processes, and of C libraries.
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
            if not (shown and include_children):
                os.dup2(handle, number)
                continue
            # A process copies to the log and to the console, not a thread: it still copies the last
            # output of a crash.
            read, write = os.pipe()
            tee = ["tee", "-a", str(path)]
            null = subprocess.DEVNULL
            _copiers.append(
                subprocess.Popen(tee, stdin=read, stdout=seen, stderr=null, start_new_session=True)
            )
            os.dup2(write, number)
            os.close(read)
            os.close(write)
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


LAUNCHER_PID = "LOCKSTEP_LAUNCHER_PID"  # set by Lockstep's launcher for its ranks
FAILURES = "LOCKSTEP_FAILURES"  # the folder where the launcher reads failure files


_done_marks: list[Path] = []  # of this process's rank, while it runs under Lockstep's launcher


def mark_done() -> None:
    """Tell the launcher that this rank has done its work, and may end."""
    for mark in _done_marks:
        mark.touch()


def run_as_worker(
    work: Callable[[], int | None],
    *,
    logs: Path,
    launched: bool = True,
    include_children: bool = False,
) -> int:
    """Run `work()` as this process's rank, with its output in `logs/rank-N.log`.

    Return the process's exit code.

    `launched`: a launcher started this process; else a person did, and it is theirs.
    `include_children`: the console also shows the output of child processes, if it shows this
    rank's. Under Lockstep's launcher a preempted rank exits with 0 after writing its failure file:
    torch's agent would stop the ranks that are still saving if one exits with another code.
    """
    worker = _worker_of_this_process(logs, launched=launched)
    facts = worker.facts
    shown = ConsoleOutput.from_environment().streams(facts.local_rank, is_main=facts.is_main)
    # torch's @record writes there; the agent sets none
    if not os.environ.get("TORCHELASTIC_ERROR_FILE"):
        error_file = logs / f"rank-{facts.rank}.error.json"
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(error_file.absolute())
    stream: Tee | None = None
    with ExitStack() as stack:
        stack.enter_context(signals.answered(partial(_exit_before_training, worker)))
        try:
            output = to_log(
                worker.log,
                on_console=shown,
                descriptors=launched,
                include_children=include_children,
            )
            stream = stack.enter_context(output)
            if launched:
                _show_stacks(worker)
            code = work() or EXIT_DONE
            failure = preempted(facts) if code == EXIT_PREEMPTED else None
            if failure is None:
                mark_done()
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            if launched:
                # a neighbour's failure makes the launcher end this rank: it tells its own first
                signals.ignore(scripts_own=True)
            failure = from_exception(error, facts, worker.log)
        if failure is None:
            return code
        _report(failure, worker.failures, stream)
        return _end_after(failure, worker)


@dataclass(frozen=True)
class _Worker:
    """This process as a rank."""

    facts: RankFacts
    logs: Path  # the folder of all ranks' logs
    launched: bool  # by a launcher, not by a person
    failures: Path | None  # the folder where Lockstep's launcher reads failure files

    @property
    def log(self) -> Path:
        """The file of this rank's output."""
        return self.logs / f"rank-{self.facts.rank}.log"


def _worker_of_this_process(logs: Path, *, launched: bool) -> _Worker:
    """Read what the launcher has set for this rank, and bind the process to it and to its cores."""
    facts = rank_facts()
    if launched:
        die_with_parent()
        cores.bind(facts.local_rank, facts.local_world_size)  # before torch makes threads
    # Removed from the environment: processes that this one starts are not ranks.
    os.environ.pop(LAUNCHER_PID, None)
    folder = os.environ.pop(FAILURES, None)
    failures = None if folder is None else Path(folder)
    _done_marks[:] = [] if failures is None else [failures / done_mark(facts.rank)]
    return _Worker(facts, logs, launched, failures)


def _exit_before_training(worker: _Worker, number: int) -> None:
    """Exit on a signal: there is nothing to save before training has begun.

    The trainer handles signals later.
    """
    facts = worker.facts
    text = f"stopped by {signals.name_of(number)} before the training began"
    written = _write_failure(preempted(facts, text), worker.failures)
    # Lockstep's launcher prints it, if needed; another one stops all ranks after one has
    # printed why it failed.
    if facts.is_main and not written and not _failure_mark().exists():
        with suppress(OSError):
            os.write(console(sys.stderr).fileno(), f"lockstep: {text}\n".encode())
    signals.end_now(EXIT_DONE if written else EXIT_PREEMPTED, "")


def _show_stacks(worker: _Worker) -> None:
    """Write the stacks of all threads when the process crashes, or when the launcher asks."""
    faulthandler.enable(file=os.fdopen(open_to_append(worker.log), "a"))
    if FOLDER in os.environ:
        write_on_request(stacks_file(worker.logs, worker.facts.rank))


def _end_after(failure: Failure, worker: _Worker) -> int:
    """Return the exit code; a launched rank that has failed ends here."""
    if failure.kind == "preempted":
        return failure.exit_code if worker.failures is None else EXIT_DONE
    if worker.launched:
        # skip the interpreter's shutdown: it may wait for peers that left
        for child in multiprocessing.active_children():
            child.kill()
        flush_both()
        os._exit(failure.exit_code)
    return failure.exit_code


def _report(failure: Failure, folder: Path | None, stream: Tee | None) -> None:
    """Write the traceback to the log, and the failure for the launcher.

    Without a launcher the failure is printed. Either disk may be full.
    """
    if (
        failure.traceback
        and failure.kind != "usage"
        and (stream is None or not stream.write_to_log(failure.traceback))
    ):
        # the message must not refer to a traceback that is not there
        failure = replace(failure, log=None)
    if not _write_failure(failure, folder) and failure.kind != "preempted" and first_to_fail():
        print_error(failure.error(), failure.traceback)


def _write_failure(failure: Failure, folder: Path | None) -> bool:
    """Write the failure file if there is a folder for it.

    Return whether it was written: the disk may be full.
    """
    with suppress(OSError):
        if folder is not None:
            failure.write(folder)
            return True
    return False


def first_to_fail() -> bool:
    """Return whether no other rank of this machine has failed in this attempt.

    Their common parent is the launcher.
    """
    try:
        if rank_facts().world_size > 1:
            scratch.sweep()
            _failure_mark().touch(exist_ok=False)
    except FileExistsError:
        return False
    except (OSError, UsageError):
        # the disk is full, or the environment contradicts itself, differently for each rank:
        pass  # one message too many is better than none
    return True


def _failure_mark() -> Path:  # of this machine and this attempt
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Path(
        tempfile.gettempdir(), f"lockstep-failed-{os.getuid()}-{parent_identity()}-{attempt}"
    )


def print_error(error: LockstepError, trace: str = "") -> None:
    """Print the message to the console, but not to the log."""
    stream = console(sys.stderr)
    if os.environ.get("LOCKSTEP_TRACEBACK") == "1" and trace:
        stream.write(trace)
    stream.write(f"lockstep: {printable(str(error))}\n")
    stream.flush()


@contextmanager
def environment_with(added: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes that are started inside the block."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its launcher dies for any reason (Linux)."""
    die_with_this_process()
    launcher = os.environ.get(LAUNCHER_PID)
    if launcher is not None and int(launcher) != os.getppid():
        os._exit(1)  # the launcher died before the line above
