"""Whether starting the ranks again helps."""

import re
from pathlib import Path

from lockstep.errors import RunError
from lockstep.launch.failures import Failure
from lockstep.records import RunDirectory


class CrashLoop:
    """Notices that ranks fail in the same way again and again, with no checkpoint in between.

    Args:
        checkpoints: the run's folder of checkpoints; it need not be there.
    """

    LIMIT = 3  # equal failures in order

    def __init__(self, checkpoints: Path) -> None:
        self._checkpoints = checkpoints
        self._seen: tuple[str, int] | None = None
        self._times = 0

    def check(self, cause: Failure | None) -> None:
        """Take one failure.

        Raises:
            LockstepError: it is the third of its kind; says what was seen.
        """
        if cause is None:
            return
        steps = [int(p.name[5:]) for p in self._checkpoints.glob("step-*") if re.fullmatch(r"step-\d{8}", p.name)]
        if not steps:  # `checkpoint.storage` keeps them elsewhere: the run says what it saved
            saves = RunDirectory(self._checkpoints.parent).read_events()
            steps = [event["step"] for event in saves if event["kind"] == "save"]
        seen = (re.sub(r"[\d.]+", "#", cause.what), max(steps, default=0))
        self._times = self._times + 1 if seen == self._seen else 1
        self._seen = seen
        if self._times >= self.LIMIT:
            error = cause.error()
            raise RunError(
                error.what, where=error.where,
                why=f"{self._times} times in order, with no checkpoint after step {seen[1]} in between: starting again "
                f"does not help{'; ' + error.why if error.why else ''}",
                fix=error.fix,
            )  # fmt: skip
