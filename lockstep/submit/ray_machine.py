"""One machine of a run on Ray: an actor, whose launcher starts the machine's ranks.

As a program it becomes the launcher, which gets SIGTERM when its actor dies for any reason: its
ranks save, as far as the others are still there.

Tests: tests/submit/test_real_ray.py
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib import import_module

from lockstep.errors import EXIT_USAGE
from lockstep.machine.processes import die_with_this_process, send_signal

_MODULE = "lockstep.submit.ray_machine"
_READING_SECONDS = 0.5  # how long `new_output` waits for text
_LAST = None  # ends the lines of a launcher


class Machine:
    """Starts the launcher of one machine, and hands on what it says.

    No method takes longer than a second, so that `stop` is never kept waiting by another.
    """

    def __init__(self) -> None:
        self._launcher: subprocess.Popen[str] | None = None
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def meeting_point(self) -> tuple[str, int]:
        """Return this machine's address in the cluster, and a port that is free there."""
        address: str = import_module("ray").util.get_node_ip_address()
        with socket.create_server((address, 0)) as free:
            return address, free.getsockname()[1]

    def start(self, words: Sequence[str]) -> None:
        """Start the launcher, a command line."""
        environment = dict(os.environ)
        # Ray sets it to the actor's cores, which are for all ranks; the launcher divides them.
        environment.pop("OMP_NUM_THREADS", None)
        self._lines = queue.SimpleQueue()
        self._launcher = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment | {"PYTHONUNBUFFERED": "1"},
        )
        threading.Thread(target=self._read, args=(self._launcher, self._lines), daemon=True).start()

    def new_output(self) -> tuple[str, int | None]:
        """Return new lines, and the exit code once the launcher has ended and no line is left."""
        lines: list[str] = []
        try:
            line = self._lines.get(timeout=_READING_SECONDS)
            while line is not _LAST:
                lines.append(line)
                line = self._lines.get_nowait()
        except queue.Empty:
            return "".join(lines), None
        assert self._launcher is not None
        code = self._launcher.wait()
        return "".join(lines), 128 - code if code < 0 else code

    def stop(self, number: int) -> None:
        """Send a signal to the launcher, if it runs."""
        if self._launcher is not None and self._launcher.poll() is None:
            send_signal(self._launcher.pid, number)

    @staticmethod
    def _read(launcher: "subprocess.Popen[str]", lines: "queue.SimpleQueue[str | None]") -> None:
        assert launcher.stdout is not None
        for line in launcher.stdout:
            lines.put(line)
        lines.put(_LAST)


def become(actor: int, words: Sequence[str]) -> None:
    """Become the launcher, as a child of the process `actor`."""
    die_with_this_process(signal.SIGTERM)
    if os.getppid() != actor:
        sys.exit(EXIT_USAGE)  # it died before the line above
    try:
        os.execvp(words[0], list(words))
    except OSError as error:
        sys.exit(f"lockstep: {words[0]} can't be started on {socket.gethostname()}: {error}")


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
