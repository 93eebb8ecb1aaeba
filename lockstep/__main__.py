"""Runs `python -m lockstep` and the command `lockstep`.

Tests: tests/launch/test_signals.py, tests/cli/test_cli.py
"""

import gc
import os
import sys

from lockstep.errors import EXIT_PREEMPTED
from lockstep.machine import signals
from lockstep.machine.output import prepare_streams


def run() -> int:
    """Run `main` in a process of its own, which ends with it."""
    prepare_streams()
    if sys.argv[1:2] in (["train"], ["launch"]) and "LOCKSTEP_LAUNCHER_PID" not in os.environ:
        signals.listen(_leave)  # Lockstep's launcher starts ranks with signals blocked
    from lockstep.prepared import warm  # after the line above: importing takes a while

    code = warm.run(sys.argv[1:])
    if code is None:
        from lockstep.cli import main
        from lockstep.prepared import fork_server

        code = fork_server.run(main)
    signals.ignore()
    gc.freeze()  # else the interpreter's end would visit each of torch's million objects: a second
    return code


def _leave(number: int) -> None:
    """Exit with 75.

    A rank of another launcher prints nothing: that launcher says why it stopped its ranks.
    """
    message = (
        f"stopped by {signals.name_of(number)} before anything was started"
        if "RANK" not in os.environ
        else ""
    )
    signals.end_now(EXIT_PREEMPTED, message)


if __name__ == "__main__":
    sys.exit(run())
