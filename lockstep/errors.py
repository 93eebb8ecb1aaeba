"""Defines errors with messages for the person who started the run.

An error has four parts: what happened, where, why, and what to do. The command line prints `str(error)` once, without a
traceback, and exits with the error's `exit_code`. A `Contradiction` is a rule about settings, written once with its
message, and evaluated when a config is loaded and again at placement with what only ranks know. Does not import torch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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

    def __init__(self, what: str, *, where: str | None = None, why: str | None = None, fix: str | None = None) -> None:
        self.what, self.where, self.why, self.fix = what, where, why, fix
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  {label}: {text}" for label, text in self._details() if text]
        return "\n".join(lines)

    def _details(self) -> list[tuple[str, str | None]]:
        return [("where", self.where), ("why", self.why), ("do", self.fix)]

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions are sent between ranks; the default would call the constructor without its keywords.
        return (_rebuild, (type(self), self.what, self.where, self.why, self.fix))


def _rebuild(
    kind: type[LockstepError], what: str, where: str | None, why: str | None, fix: str | None
) -> LockstepError:
    return kind(what, where=where, why=why, fix=fix)


class UsageError(LockstepError):
    """The command, the config or the input is wrong: nothing was started, nothing is lost. Exit code 2."""

    exit_code = EXIT_USAGE


class RunError(LockstepError):
    """The run failed. Exit code 1."""

    exit_code = EXIT_FAILED


# ---- what messages are made of ----


def listed(names: Sequence[str], shown: int = 4) -> str:
    """Return the first few names and the number of others: `a, b, c, d and 3 more`."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'layers'?` if a known word is similar, else ""."""
    import difflib  # needed only for errors

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else ""


@dataclass(frozen=True)
class Contradiction:
    """Keys that contradict each other or the ranks, and what to write instead.

    Attributes:
        keys: dotted names of the config's keys.
        what: what is wrong, one sentence without a final full stop.
        fix: what to write.
        why: the reason, if `what` does not make it clear.
    """

    keys: tuple[str, ...]
    what: str
    fix: str
    why: str | None = None


def refuse(contradictions: Iterable[Contradiction]) -> None:
    """Raise the first contradiction, if there is one.

    Raises:
        UsageError: with the keys, the reason and what to write.
    """
    for found in contradictions:
        raise UsageError(found.what, where=", ".join(found.keys), why=found.why, fix=found.fix)
