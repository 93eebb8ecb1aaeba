"""Defines errors with messages for the person who started the run.

The command line prints `str(error)` once, without a traceback, and exits with the error's
`exit_code`. Rules about settings are evaluated when a config is loaded, and again at placement with
what only ranks know.
"""

import re
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: saved, please requeue


class LockstepError(Exception):
    """An error with a message for people.

    Args:
        what: what happened, one sentence without a final full stop.
        where: a file and line, a config key, a rank, a step.
        why: the reason, if `what` does not make it clear.
        fix: what to do about it.
    """

    exit_code = EXIT_FAILED

    def __init__(
        self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None
    ) -> None:
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix
        super().__init__(str(self))

    def __str__(self) -> str:
        details = [("where", self.where), ("why", self.why), ("do", self.fix)]
        return "\n".join([self.what, *(f"  {label}: {text}" for label, text in details if text)])

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are sent between ranks; the default would call the constructor without its
        # keywords.
        return partial(type(self), self.what, where=self.where, why=self.why, fix=self.fix), ()


class UsageError(LockstepError):
    """The command, the config or the input is wrong: nothing was started, nothing is lost.

    The exit code is 2.
    """

    exit_code = EXIT_USAGE

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the lines of the user's code alone."""
        return "".join(
            traceback.format_exception(type(self), self, only_user_code(self.__traceback__))
        ).splitlines()


class RunError(LockstepError):
    """The run failed. The exit code is 1."""

    exit_code = EXIT_FAILED


_PEER_IS_GONE = re.compile(
    r"connection (closed|reset|refused|abort|timed out)|broken pipe|no route to host"
    r"|network is (down|unreachable)|transport endpoint|socket timeout|communicator was aborted"
    r"|remote process exited|failed to (recv|send)|recvvalue failed|sendbytes failed|heartbeat"
    r"|did not meet the other ranks",
    re.IGNORECASE,
)


def lost_a_peer(error: BaseException) -> bool:
    """Return whether the error's text says that another rank is gone.

    Errors of torch and of its backends say so.
    """
    return bool(_PEER_IS_GONE.search(str(error)))


_NOT_USERS = tuple(
    {
        str(Path(__file__).parent),
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    }
)


def only_user_code(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames of a traceback that are of no library.

    The whole traceback if there are none.
    """
    frames = []
    step = trace
    while step is not None:
        if not step.tb_frame.f_code.co_filename.startswith(_NOT_USERS):
            frames.append(step)
        step = step.tb_next
    kept = None
    for frame in reversed(frames):
        kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return kept or trace


def listed(names: Sequence[str], shown: int = 4) -> str:
    """Return the first few names and the number of others: `a, b, c, d and 3 more`."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def first_line(said: object) -> str:
    """Return the first line of what an error, or another object, says that is not empty.

    An error that says nothing, such as a bare `assert`, has the name of its class.
    """
    lines = (line.strip() for line in str(said).splitlines())
    silent = type(said).__name__ if isinstance(said, BaseException) else ""
    return next(filter(None, lines), silent)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'layers'?` if a known word is similar, else ""."""
    import difflib  # needed only for errors

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True)
class Contradiction:
    """Keys that contradict each other or the ranks, and what to write instead.

    The words are those of an error.
    """

    keys: tuple[str, ...]  # dotted
    what: str
    fix: str
    why: str | None = None


def refuse(contradictions: Iterable[Contradiction]) -> None:
    """Raise the first contradiction, if there is one, as a UsageError."""
    for found in contradictions:
        raise UsageError(found.what, where=", ".join(found.keys), why=found.why, fix=found.fix)


class NoEffectWarning(UserWarning):
    """A setting that is asked for has no effect, in this way to train or beside another setting."""


def warn_at_caller(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside of the package, which is the user's."""
    package = str(Path(__file__).parent)
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(package):
        frame = frame.f_back
        level += 1
    warnings.warn(text, category, stacklevel=level)
