"""Describes how a rank failed, or where it is stuck.

It finds the first cause among the failures of many ranks.

A failed worker writes `rank-N.json`. When one rank dies, its peers fail shortly after, because
their connection to it is gone: such failures are consequences, recognised by their messages, and
are never reported first. The state of processes is read from /proc, on Linux; their stacks they
write on SIGQUIT.

Tests: tests/launch/test_local.py, tests/diagnose/test_first_cause.py,
tests/faults/test_processes.py
"""

import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.diagnose import recognise, tail
from lockstep.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_USAGE,
    LockstepError,
    RunError,
    UsageError,
    lost_a_peer,
    only_user_code,
)
from lockstep.heartbeat.writer import own_heartbeat
from lockstep.machine.environment import RankFacts
from lockstep.machine.processes import descendants, is_stopped
from lockstep.machine.signals import name_of
from lockstep.run_directory.run_files import replace_file

# The launcher ends the rest of a run so.
_ENDED_BY_LAUNCHER = re.compile(r"DataLoader worker \(pid.*\) is killed by signal: Terminated")
_NOT_USER_CODE = re.compile(r"<frozen |/runpy\.py$|/lockstep/(launch/|cli/|__main__\.py)")
_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = re.compile(rf"/(site-packages|dist-packages)/|/lib/python\d|^{re.escape(_PACKAGE)}/")
_FRAMES_SHOWN = 3


@dataclass(frozen=True)
class Failure:
    """The end of a rank without success.

    `what`, `where`, `why` and `fix` are as in `LockstepError`.
    """

    rank: int
    world_size: int
    # usage, error (an exception), exit (the program's own code), signal, hang, or preempted (saved)
    kind: str
    what: str
    exit_code: int = EXIT_FAILED
    where: str | None = None
    why: str | None = None
    fix: str | None = None
    host: str = ""
    time: float = 0.0
    traceback: str = ""  # the whole of it, for LOCKSTEP_TRACEBACK=1
    log: str | None = None  # path of the rank's log
    consequence: bool = False  # the loss of a peer explains it
    before_training: bool = False  # the rank was asked to stop before there was anything to save

    def write(self, folder: Path) -> None:
        """Write it for the launcher, as this rank's file in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"rank-{self.rank}.json", json.dumps(asdict(self)))

    def error(self) -> LockstepError:
        """Return what the launcher prints: a UsageError as it was, else one that names the rank."""
        if self.kind == "usage":
            return UsageError(self.what, where=self.where, why=self.why, fix=self.fix)
        who = "" if self.world_size == 1 else f"rank {self.rank} of {self.world_size} failed: "
        host = f"host {self.host}" if self.world_size > 1 else None
        where = ", ".join(part for part in (host, self.where) if part)
        read = "the whole traceback is in" if self.kind == "error" else "its last output is in"
        read = f"{read} {self.log}" if self.log else ""
        return RunError(
            who + self.what,
            where=where,
            why=self.why,
            fix="; ".join(t for t in (self.fix, read) if t),
        )


def preempted(facts: RankFacts, before_training: str = "") -> Failure:
    """Return the failure of a rank that stopped on request.

    It saved, or `before_training` says why it did not.
    """
    what = before_training or "preempted and saved"
    early = bool(before_training)
    return Failure(
        facts.rank,
        facts.world_size,
        "preempted",
        what,
        exit_code=EXIT_PREEMPTED,
        before_training=early,
    )


def from_exception(error: BaseException, facts: RankFacts, log: Path | None) -> Failure:
    """Return the failure for `error`, caught at the top of a worker."""
    common: dict[str, Any] = {
        "rank": facts.rank,
        "world_size": facts.world_size,
        "host": socket.gethostname(),
        "time": time.time(),
        "traceback": _traceback_of(error),
        "log": None if log is None else str(log),
    }
    if isinstance(error, LockstepError):
        kind = "usage" if error.exit_code == EXIT_USAGE else "error"
        gone = kind == "error" and _is_consequence(error)
        parts = _parts(error)
        line = _user_line(error.__traceback__) if kind == "usage" else None
        if line is not None and line not in (error.where or ""):
            parts["where"] = f"{line}, {error.where}" if error.where else line
        known = recognise(error.why or "") if error.fix is None else None
        if known is not None:
            parts["fix"] = known.fix
        return Failure(**common, **parts, kind=kind, exit_code=error.exit_code, consequence=gone)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else EXIT_FAILED
        text = "" if isinstance(error.code, int) else f": {error.code}"
        passed_on = code if code in (EXIT_USAGE, EXIT_PREEMPTED) else EXIT_FAILED
        kind = "preempted" if code == EXIT_PREEMPTED else "exit"
        return Failure(
            **common,
            kind=kind,
            what=f"the program left with code {code}{text}",
            exit_code=passed_on,
        )
    if isinstance(error, KeyboardInterrupt):
        return Failure(**common, kind="signal", what="interrupted", consequence=True)
    first_line, _, rest = str(error).strip().partition("\n")
    where, frames = _user_frames(error.__traceback__)
    known = recognise("\n".join([f"{type(error).__name__}: {error}", *frames[-1:]]), log)
    why = ([known.cause] if known else []) + [*rest.splitlines()[:3], *frames]
    what = f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__
    reason = "\n       ".join(line for line in why if line.strip()) or None
    gone = _is_consequence(error) or (known is not None and known.consequence)
    fix = known.fix if known else None
    ended = own_heartbeat().explained(error) if gone else None
    if ended is not None:
        return Failure(**common, kind="usage", exit_code=EXIT_USAGE, **_parts(ended))
    return Failure(
        **common, kind="error", what=what, where=where, why=reason, fix=fix, consequence=gone
    )


def _parts(error: LockstepError) -> dict[str, Any]:
    return {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}


def _is_consequence(error: BaseException) -> bool:
    return lost_a_peer(error) or bool(_ENDED_BY_LAUNCHER.search(str(error)))


def _traceback_of(error: BaseException) -> str:
    """Return the traceback.

    Of a UsageError the user's lines alone, unless the whole of it was asked for.
    """
    if isinstance(error, UsageError) and os.environ.get("LOCKSTEP_TRACEBACK") != "1":
        shown = only_user_code(error.__traceback__)
        return "".join(traceback.format_exception(type(error), error, shown, chain=False))
    return "".join(traceback.format_exception(error))


def _user_line(trace: TracebackType | None) -> str | None:
    """Return the innermost line of the user's own code; None if there is none."""
    frames = [
        f
        for f in traceback.extract_tb(trace)
        if not (_NOT_USER_CODE.search(f.filename) or _is_library(f))
    ]
    return f"{short_path(frames[-1].filename)}:{frames[-1].lineno}" if frames else None


def _is_library(frame: traceback.FrameSummary) -> bool:
    return bool(_LIBRARIES.search(frame.filename))


def _user_frames(trace: TracebackType | None) -> tuple[str | None, list[str]]:
    """Return the line of code nearest to the error, and the frames before it.

    It is in the user's own code, else in a library.
    """
    frames = [f for f in traceback.extract_tb(trace) if not _NOT_USER_CODE.search(f.filename)]
    own = [f for f in frames if not _is_library(f)] or frames
    if not own:
        return None, []
    # Include the innermost frame even if it is a library's: it names the function that raised.
    shown = own[-_FRAMES_SHOWN:] + ([frames[-1]] if frames[-1] is not own[-1] else [])
    lines = [f"{short_path(f.filename)}:{f.lineno} in {f.name}: {f.line}" for f in shown]
    return f"{short_path(own[-1].filename)}:{own[-1].lineno}", lines


def short_path(path: str) -> str:
    """Return the path relative to the working directory, if it is inside."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except (ValueError, FileNotFoundError):  # FileNotFoundError: the working directory is gone
        return path


def from_exit_code(rank: int, world_size: int, code: int, seen: float, log: Path | None) -> Failure:
    """Return the failure of a rank that wrote no file.

    `code` is negative for a signal, `seen` in Unix time.
    """
    common: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "host": socket.gethostname(),
        "time": seen,
    }
    path = None if log is None else str(log)
    if code == 0:
        return Failure(
            **common,
            kind="exit",
            what="the program ended with code 0 before its work was done",
            log=path,
        )
    if code > 0:
        kind = "exit"
        what = f"the program left with code {code}"
        ours = False
    else:
        kind = "signal"
        what = f"killed by {name_of(-code)}"
        ours = -code == signal.SIGTERM  # the launcher sends it to the peers of a failed rank
    # SIGABRT alone has no cause: the library that called abort() has logged it.
    known = recognise(what) or (None if log is None or ours else recognise(tail(log)))
    parts: dict[str, Any] = {"why": known.cause, "fix": known.fix} if known else {}
    if kind == "signal" and log is not None:
        parts["where"] = _place_of_death(log)
    return Failure(**common, **parts, kind=kind, what=what, log=path, consequence=ours)


def done_mark(rank: int) -> str:
    """Return the name of the file that marks a rank's work as done."""
    return f"done-rank-{rank}.mark"


def read_all(folder: Path) -> list[Failure]:
    """Return the failures whose files are in the folder."""
    known = {f.name for f in fields(Failure)}
    failures = []
    for path in sorted(folder.glob("rank-*.json")):
        row = json.loads(path.read_text())
        failures.append(Failure(**{key: value for key, value in row.items() if key in known}))
    return failures


def first_cause(failures: Iterable[Failure]) -> Failure | None:
    """Return the failure to report.

    It is the earliest that is not a consequence of another, else the earliest.
    """
    ended = [f for f in failures if f.kind != "preempted"]
    return min(ended, key=lambda f: (f.consequence, f.time), default=None)


def exit_code(failures: Iterable[Failure], *, may_be_stopped: bool = True) -> int:
    """Return the launcher's exit code when all ranks have ended.

    `may_be_stopped`: somebody may have asked them to.
    """
    failures = list(failures)
    cause = first_cause(failures)
    # A rank that is asked to stop before it has begun exits; its peers then fail because it is
    # missing.
    one_left = any(f.kind == "preempted" for f in failures)
    explained = may_be_stopped and cause is not None and cause.consequence and one_left
    if cause is not None and not explained:
        return cause.exit_code
    return EXIT_PREEMPTED if failures else EXIT_DONE


_DATA_WORKER = "pt_data_worker"  # torch's name for them
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')
_TORCH = re.compile(r"/torch/|<frozen ")
_COLLECTIVE = re.compile(r"/torch/distributed/")
_OURS = re.compile(r"/lockstep/|/torch/|/site-packages/|/lib/python\d|<frozen |<string>")


@dataclass(frozen=True)
class Stopped:
    """A process that a signal such as SIGSTOP has stopped: a rank, or one of its data workers."""

    rank: int
    process: int
    is_worker: bool

    def __str__(self) -> str:
        return f"its data worker (process {self.process})" if self.is_worker else "it"


def stopped_processes(pids: Mapping[int, int]) -> list[Stopped]:
    """Return the stopped ranks (`pids`: rank → process) and their data workers, by rank."""
    stopped = []
    for rank, pid in sorted(pids.items()):
        if is_stopped(pid):
            stopped.append(Stopped(rank, pid, is_worker=False))
        for child in descendants(pid):
            with suppress(OSError):  # it has ended
                if (
                    is_stopped(child)
                    and Path(f"/proc/{child}/comm").read_text().strip() == _DATA_WORKER
                ):
                    stopped.append(Stopped(rank, child, is_worker=True))
    return stopped


def stacks_file(logs: Path, rank: int) -> Path:
    """Return the file for a rank's stacks."""
    return logs / f"rank-{rank}.stacks.txt"


@dataclass(frozen=True)
class Stack:
    """Frames of a rank's main thread, innermost first: (file, line, function)."""

    frames: tuple[tuple[str, int, str], ...] = ()

    @property
    def place(self) -> str | None:
        """The innermost frame of the user's code if there is one, else the innermost of all."""
        if not self.frames:
            return None
        own = next((frame for frame in self.frames if not _OURS.search(frame[0])), self.frames[0])
        return f"{short_path(own[0])}:{own[1]} in {own[2]}"

    @property
    def in_torch(self) -> bool:
        """Return whether the innermost call is one of torch's."""
        return bool(self.frames) and bool(_TORCH.search(self.frames[0][0]))

    @property
    def in_collective(self) -> bool:
        """Return whether the user's own code waits in a collective."""
        for file, _, _ in self.frames:
            if _COLLECTIVE.search(file):
                return True
            if not _OURS.search(file):
                return False
        return False


def newest_stack(logs: Path, rank: int) -> Stack:
    """Return the newest stack that the rank wrote; empty if there is none."""
    try:
        text = stacks_file(logs, rank).read_text(errors="replace")
    except OSError:
        return Stack()
    return _last_stack(text)


def _last_stack(text: str) -> Stack:
    """Return the last stack in what faulthandler wrote: the main thread's."""
    blocks = re.split(r"^(?:Current thread|Thread) ", text, flags=re.MULTILINE)
    return Stack(tuple((m["file"], int(m["line"]), m["name"]) for m in _FRAME.finditer(blocks[-1])))


def _place_of_death(log: Path) -> str | None:
    """Return where the main thread was when a signal such as SIGABRT ended a rank.

    None if its log does not say so.
    """
    _, marker, stacks = tail(log).rpartition("Fatal Python error: ")
    return _last_stack(stacks).place if marker else None


# The outermost frame of a main thread, which faulthandler writes last; of more than a hundred
# frames it leaves out the outer ones.
_LAST_LINE = re.compile(r" in (?:<module>|_run_module_as_main)|  \.\.\.")


def newest_stack_is_whole(logs: Path, rank: int) -> bool:
    """Return whether the rank has written the newest stack to its end, and not a part of it yet."""
    try:
        text = stacks_file(logs, rank).read_text(errors="replace")
    except OSError:
        return False
    return text.endswith("\n") and bool(_LAST_LINE.search(text.splitlines()[-1]))
