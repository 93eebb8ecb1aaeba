"""Errors that speak to the person who started the run.

An error says four things: what happened, where, why, and what to do. The command line prints `str(error)` once, with no
traceback, and exits with the error's `exit_code`. Nothing here imports torch.
"""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREEMPTED = 75  # EX_TEMPFAIL: saved, please requeue


class LockstepError(Exception):
    """An error with a message for people.

    Args:
        what: what happened, one sentence without a final full stop.
        where: the place: a file and line, a config key, a rank, a step.
        why: the reason, where it is not plain from `what`.
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
        # Exceptions travel between ranks; the default would call the constructor without its keywords.
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
