"""`python -m lockstep` and the command `lockstep`: a process of its own."""

import gc
import os
import sys

from lockstep import signals
from lockstep.errors import EXIT_PREEMPTED


def run() -> int:
    """`main`, in a process that ends with it."""
    if sys.argv[1:2] in (["train"], ["launch"]) and "LOCKSTEP_LAUNCHER_PID" not in os.environ:
        signals.listen(_leave)  # a rank of Lockstep's launcher begins with signals held back
    from lockstep.cli import main  # after the line above: importing it takes a while

    code = main()
    signals.ignore()
    gc.freeze()  # the end would look at each of torch's million objects once more: a second
    return code


def _leave(number: int) -> None:
    """End with 75. A rank of another launcher does so without a word: that launcher tells why it stopped its ranks."""
    said = f"stopped by {signals.name_of(number)} before anything was started" if "RANK" not in os.environ else ""
    signals.end_now(EXIT_PREEMPTED, said)


if __name__ == "__main__":
    sys.exit(run())
