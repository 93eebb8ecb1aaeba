"""Writes the Python stacks of a rank when its launcher asks for them.

A thread writes them, with Python's lock (GIL), while no other thread can run Python: a rank that
waits in C has let go of the lock, so it answers, too. faulthandler's own handler of signals does
not take the lock. It reads frames while threads make and free them, and has crashed ranks that ran
Python (SIGSEGV), one in some hundred times. It answers a second signal alone, which the launcher
sends to a rank that has not answered the first for long: code in C keeps the lock there, and no
frame changes.

Tests: tests/failures/test_hang.py
"""

import faulthandler
import os
import signal
from pathlib import Path

from lockstep.machine import signals
from lockstep.run_directory.run_files import open_to_append

STACKS_SIGNAL = signal.SIGQUIT  # `kill -QUIT` makes a rank write its stacks at any time
# Python ignores it where nobody has set a handler
FORCED_STACKS_SIGNAL = signal.SIGXFSZ


def write_on_request(path: Path) -> None:
    """Append this process's stacks to the file at each of the two signals, the main thread's last.

    The file is there, empty, once the signals are answered.
    """

    def write(_number: int) -> None:
        with os.fdopen(open_to_append(path), "a") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    signals.answer_also(STACKS_SIGNAL, write)
    file = os.fdopen(open_to_append(path), "a")
    faulthandler.register(FORCED_STACKS_SIGNAL, file=file, all_threads=True)
