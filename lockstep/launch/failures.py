"""What a rank leaves behind when it fails, and how the first cause is found among the files of many ranks.

A worker writes `rank-N.json` into the folder that the launcher named. When one rank dies, its peers fail a moment
later because the connection to it is gone: those are consequences, known by their messages, and never reported first.
Errors that are known (`lockstep.diagnose.known_errors`) are told with their cause and what to do.
"""

import json
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any

from lockstep.diagnose.known_errors import recognise, tail
from lockstep.environment import RankFacts
from lockstep.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_PREEMPTED,
    EXIT_USAGE,
    LockstepError,
    RunError,
    UsageError,
)

_PEER_IS_GONE = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|socket timeout|communicator was aborted"
    r"|remote process exited|failed to (recv|send)|recvvalue failed|sendbytes failed|heartbeat"
    r"|did not meet the other ranks"
    r"|DataLoader worker \(pid.*\) is killed by signal: Terminated",  # as the launcher ends what is left of a run
    re.IGNORECASE,
)
_NOT_THE_USERS = re.compile(r"<frozen |/runpy\.py$|/lockstep/(launch/|cli/|__main__\.py)")
_LIBRARIES = re.compile(r"/(site-packages|dist-packages)/|/lib/python\d")
_FRAMES_SHOWN = 3


@dataclass(frozen=True)
class Failure:
    """How one rank ended, other than well.

    Attributes:
        kind: "usage" (a wrong config or command), "error" (an exception), "exit" (the program left with a code),
            "signal", "hang", or "preempted" (saved, please requeue).
        what, where, why, fix: as in `LockstepError`.
        traceback: the whole of it, for LOCKSTEP_TRACEBACK=1.
        log: path of the rank's log.
        consequence: whether a peer that went away explains it.
        before_training: whether the rank was told to stop before there was anything to save.
    """

    rank: int
    world_size: int
    kind: str
    what: str
    exit_code: int = EXIT_FAILED
    where: str | None = None
    why: str | None = None
    fix: str | None = None
    host: str = ""
    time: float = 0.0
    traceback: str = ""
    log: str | None = None
    consequence: bool = False
    before_training: bool = False

    def write(self, folder: Path) -> None:
        """Leave it as `rank-N.json`; whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f".rank-{self.rank}-{os.getpid()}"
        beside.write_text(json.dumps(asdict(self)))
        beside.rename(folder / f"rank-{self.rank}.json")

    def error(self) -> LockstepError:
        """The one message about it."""
        if self.kind == "usage":
            return UsageError(self.what, where=self.where, why=self.why, fix=self.fix)
        who = "" if self.world_size == 1 else f"rank {self.rank} of {self.world_size} failed: "
        host = f"host {self.host}" if self.world_size > 1 else None
        where = ", ".join(part for part in (host, self.where) if part)
        read = f"the whole traceback is in {self.log}" if self.log and self.kind == "error" else None
        if self.log and self.kind != "error":
            read = f"the last that it said is in {self.log}"
        return RunError(who + self.what, where=where, why=self.why, fix="; ".join(t for t in (self.fix, read) if t))


def preempted(facts: RankFacts, before_training: str = "") -> Failure:
    """A rank that was told to stop and did: it saved, or, as `before_training` says, it had nothing to save yet."""
    what = before_training or "preempted and saved"
    return Failure(
        facts.rank, facts.world_size, "preempted", what, exit_code=EXIT_PREEMPTED, before_training=bool(before_training)
    )


def from_exception(error: BaseException, facts: RankFacts, log: Path | None) -> Failure:
    """What `error`, caught at the top of a worker, says to people."""
    common: dict[str, Any] = {
        "rank": facts.rank,
        "world_size": facts.world_size,
        "host": socket.gethostname(),
        "time": time.time(),
        "traceback": "".join(traceback.format_exception(error)),
        "log": None if log is None else str(log),
    }
    if isinstance(error, LockstepError):
        told: dict[str, Any] = {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
        kind = "usage" if error.exit_code == EXIT_USAGE else "error"
        gone = kind == "error" and bool(_PEER_IS_GONE.search(str(error)))
        return Failure(**common, **told, kind=kind, exit_code=error.exit_code, consequence=gone)
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else EXIT_FAILED
        said = "" if isinstance(error.code, int) else f": {error.code}"
        passed_on = code if code in (EXIT_USAGE, EXIT_PREEMPTED) else EXIT_FAILED
        kind = "preempted" if code == EXIT_PREEMPTED else "exit"
        return Failure(**common, kind=kind, what=f"the program left with code {code}{said}", exit_code=passed_on)
    if isinstance(error, KeyboardInterrupt):
        return Failure(**common, kind="signal", what="interrupted", consequence=True)
    first_line, _, rest = str(error).strip().partition("\n")
    where, frames = users_frames(error.__traceback__)
    known = recognise(f"{type(error).__name__}: {error}", log)
    why = ([known.cause] if known else []) + [*rest.splitlines()[:3], *frames]
    return Failure(
        **common,
        kind="error",
        what=f"{type(error).__name__}: {first_line}" if first_line else type(error).__name__,
        where=where,
        why="\n       ".join(line for line in why if line.strip()) or None,
        fix=known.mend if known else None,
        consequence=bool(_PEER_IS_GONE.search(str(error))) or (known is not None and known.consequence),
    )


def users_frames(trace: TracebackType | None) -> tuple[str | None, list[str]]:
    """The place nearest to the error in code that is the user's own, and the last few frames that led there.

    Where no frame is the user's own, libraries' frames are taken.
    """
    frames = [f for f in traceback.extract_tb(trace) if not _NOT_THE_USERS.search(f.filename)]
    own = [f for f in frames if not _LIBRARIES.search(f.filename)] or frames
    if not own:
        return None, []
    # The innermost frame too where it is a library's: it names the function that refused.
    shown = own[-_FRAMES_SHOWN:] + ([frames[-1]] if frames[-1] is not own[-1] else [])
    lines = [f"{short_path(f.filename)}:{f.lineno} in {f.name}: {f.line}" for f in shown]
    return f"{short_path(own[-1].filename)}:{own[-1].lineno}", lines


def short_path(path: str) -> str:
    """Relative to the working directory where it lies below it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path


def from_exit_code(rank: int, world_size: int, code: int, seen: float, log: Path | None) -> Failure:
    """For a rank that left no file: it was killed, or left past Python.

    Args:
        code: as `subprocess` has it, negative for a signal.
        seen: when the launcher saw it, seconds since the Unix epoch.
    """
    common: dict[str, Any] = {"rank": rank, "world_size": world_size, "host": socket.gethostname(), "time": seen}
    path = None if log is None else str(log)
    if code == 0:
        what = "the program ended with code 0 before its work was done"
        return Failure(**common, kind="exit", what=what, log=path)
    if code > 0:
        kind, what, ours = "exit", f"the program left with code {code}", False
    else:
        kind, what = "signal", f"killed by {_signal_name(-code)}"
        ours = -code == signal.SIGTERM  # with which the launcher stops the peers of a failed rank
    # SIGABRT says nothing by itself: the library that called abort() has written why.
    known = recognise(what) or (None if log is None or ours else recognise(tail(log)))
    told: dict[str, Any] = {"why": known.cause, "fix": known.mend} if known else {}
    return Failure(**common, **told, kind=kind, what=what, log=path, consequence=ours)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def done_mark(rank: int) -> str:
    """The name of the file by which a rank says that its work is done."""
    return f"done-rank-{rank}.mark"


def read_all(folder: Path) -> list[Failure]:
    """The failures in the folder, whole ones only."""
    known = {f.name for f in fields(Failure)}
    found = []
    for path in sorted(folder.glob("rank-*.json")):
        row = json.loads(path.read_text())
        found.append(Failure(**{key: value for key, value in row.items() if key in known}))
    return found


def first_cause(failures: Iterable[Failure]) -> Failure | None:
    """The failure to report: the earliest that a peer's failure doesn't explain, else the earliest."""
    ended = [f for f in failures if f.kind != "preempted"]
    return min(ended, key=lambda f: (f.consequence, f.time), default=None)


def exit_code(failures: Iterable[Failure], *, told: bool = True) -> int:
    """The launcher's exit code when all ranks have ended.

    Args:
        told: whether somebody may have told the ranks to stop; else the ones that left did so because one had failed.
    """
    failures = list(failures)
    cause = first_cause(failures)
    # A rank that was told to stop before it had begun leaves; those that it was to meet then fail for that.
    explained = told and cause is not None and cause.consequence and any(f.kind == "preempted" for f in failures)
    if cause is not None and not explained:
        return cause.exit_code
    return EXIT_PREEMPTED if failures else EXIT_DONE
