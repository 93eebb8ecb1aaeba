"""A rank of `spawn_again` as a fork of this command's prepared process.

The fork runs a module with the name of a file, from which it reads its work.

Tests: tests/launch/test_spawn.py
"""

import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.machine.output import flush_both
from lockstep.prepared.process import ForkedChild, ForkRequest, PreparedProcess


class ForkedRank(ForkedChild):
    """A rank as `multiprocessing` shows a process.

    Args:
        prepared: whose fork it is.
        module: what the fork runs; it asks for the work that was `handed_over`.
        work: is pickled.
        environment: all its variables.
        file: where `work` is handed over; it is removed with its folder.
    """

    def __init__(
        self,
        prepared: PreparedProcess,
        module: str,
        work: Sequence[Any],
        environment: Mapping[str, str],
        file: Path,
    ) -> None:
        file.write_bytes(pickle.dumps((sys.path, pickle.dumps(work))))
        request = ForkRequest(
            module=module,
            arguments=[str(file)],
            environment=environment,
            folder=os.getcwd(),
            parent=os.getpid(),
        )
        flush_both()
        super().__init__(prepared.fork(request, (0, 1, 2)))
        self.sentinel = os.pidfd_open(self.pid)  # readable once it has ended

    @property
    def exitcode(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self.poll()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, for so many seconds at most."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(timeout)

    def close(self) -> None:
        """Forget how to wait for its end."""
        os.close(self.sentinel)


def can_be_awaited() -> bool:
    """Return whether this system can wait for one of several processes to end (Linux 5.3)."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True


def handed_over() -> Any:
    """Return the work of this process, with the folders of modules of the one that asked."""
    sys.path[:], work = pickle.loads(Path(sys.argv[1]).read_bytes())
    return pickle.loads(work)
