"""Starts Python processes as forks of one that has imported torch and Lockstep.

Importing both takes each fresh process two to three seconds of a core; a fork starts in hundredths
of a second. It is otherwise as a fresh process: a child of the one that asked for it, with the
arguments, variables, folder, streams and signal mask that were asked for. What it shares with the
prepared process are imported modules.

A process can be forked safely while it has no thread, no open device and no used generator of
random numbers; `fork_server` looks before its first fork, and says which of them stands in the way.

Loads no torch.

Tests: tests/prepared/test_process.py
"""

import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from lockstep.machine.signals import Inherited, inherited

_SERVER = "lockstep.prepared.fork_server"
MESSAGE_BYTES = 200_000
# what a message begins with: the prepared process reads no more of it, for that might import
COMES_AGAIN = b"+"
COMES_ONCE = b"-"
NONE_COMES = b"."  # the whole message: nothing is asked for, and forks that are ready may end
# of linux/prctl.h: orphans among its descendants become this process's children
_PR_SET_CHILD_SUBREAPER = 36
# Variables that Python, the loader and the allocator read when a process starts; a fork takes over
# what two of them say (`fork_server`).
_READ_AT_START = ("PYTHON", "LD_", "GLIBC_TUNABLES", "MALLOC_")
_TAKEN_OVER = ("PYTHONPATH", "PYTHONUNBUFFERED")


class CannotForkError(Exception):
    """The prepared process can't make forks; its text says why."""


@dataclass(frozen=True)
class ForkRequest:
    """Describes a process that a prepared process shall start, in a session of its own.

    Attributes:
        module: what `python -m` would run.
        arguments: of the module.
        environment: all variables of the fork.
        folder: the working directory.
        parent: the process whose child the fork becomes.
        inherited: the signals that the fork holds back and ignores at first.
        makes_forks: whether it gets a prepared process of its own, for forks of what it imported.
        comes_again: whether as many are likely to be asked for again, at once: the prepared process
            keeps forks ready for them.
        first: called in the fork before all else; it must be picklable.
    """

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    parent: int
    inherited: Inherited = field(default_factory=inherited)
    makes_forks: bool = False
    comes_again: bool = False
    first: Callable[[], None] | None = None


class PreparedProcess:
    """The channel to a process that makes forks; it ends when nobody holds the channel any more.

    Args:
        channel: this side of it.
        pid: of the prepared process.
        environment: the variables that it began with.
        process: it, where it was started afresh.
    """

    def __init__(
        self,
        channel: socket.socket,
        pid: int,
        environment: Mapping[str, str],
        process: "subprocess.Popen[bytes] | None" = None,
    ) -> None:
        self.pid = pid
        self._environment = dict(environment)
        self._process = process
        self._channel = channel
        self._lock = threading.Lock()

    def fork(self, request: ForkRequest, descriptors: Sequence[int]) -> int:
        """Return the process id of a fork, a child of this process.

        `descriptors` become its stdin, stdout and stderr. Raises CannotForkError.
        """
        reason = self.why_not(request.environment)
        if reason is not None:
            raise CannotForkError(reason)
        with self._lock:
            try:
                message = COMES_AGAIN if request.comes_again else COMES_ONCE
                message += pickle.dumps(request)
                socket.send_fds(self._channel, [message], descriptors)
                answer = self._channel.recv(MESSAGE_BYTES)
            except OSError as error:
                raise CannotForkError(f"the prepared process is gone ({error.strerror})") from error
        if not answer:
            raise CannotForkError("the prepared process has ended")
        if not answer.isdigit():
            raise CannotForkError(answer.decode())
        return int(answer)

    def why_not(self, environment: Mapping[str, str]) -> str | None:
        """Return why a fork with these variables would not be as a fresh process, or None.

        Python and the system's loader read some variables only when a process starts, and Python
        runs a `sitecustomize.py` that it finds then.
        """
        mine = self._environment
        for name in sorted(environment.keys() | mine.keys()):
            if name in _TAKEN_OVER or not name.startswith(_READ_AT_START):
                continue
            if environment.get(name) != mine.get(name):
                return f"{name} is read when a process starts"
        for module in ("sitecustomize.py", "usercustomize.py"):
            file = _first_file(module, environment)
            own_file = _first_file(module, mine)
            if file != own_file:
                return f"Python runs {file or own_file} when a process starts"
        return None

    def end_ready_forks(self) -> None:
        """Let the forks end that are ready: none will be asked for soon."""
        with self._lock, suppress(OSError):  # the prepared process is gone, and so are they
            self._channel.send(NONE_COMES)

    def close(self) -> None:
        """Let the prepared process end; its forks live on."""
        self._channel.close()
        if self._process is not None:
            self._process.wait()


def _first_file(name: str, environment: Mapping[str, str]) -> str | None:
    """Return the file of this name that is found first on PYTHONPATH."""
    for folder in filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)):
        path = os.path.join(os.path.abspath(folder), name)
        if os.path.isfile(path):
            return path
    return None


# the prepared process that this one, a fork itself, was given when it began
_own: list[PreparedProcess] = []


def give(own: PreparedProcess) -> None:
    """Note the prepared process of this fork, in place of any that its parent had."""
    _own[:] = [own]


def own_prepared_process() -> PreparedProcess | None:
    """Return the prepared process that this one was given, if it is a fork that got one."""
    return _own[0] if _own else None


def give_back() -> None:
    """Let the prepared process of this one end, if it was given one: it starts no ranks."""
    while _own:
        _own.pop().close()


def adopt_orphans() -> bool:
    """Make orphans among this process's descendants its children, as forks are at first.

    Return whether the system can do that (Linux).
    """
    if sys.platform != "linux":
        return False
    failed: int = ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    return not failed


def start(
    module: str = _SERVER,
    *,
    folder: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> PreparedProcess:
    """Start a prepared process afresh; it imports while this one goes on.

    Args:
        module: what it runs, with the number of its channel.
        folder: where it runs; unset: here.
        environment: its variables; unset: this process's.

    Raises:
        CannotForkError: this system has no way to make its forks children of this process.
    """
    if not adopt_orphans():
        raise CannotForkError("this system can't make the forks of another process children")
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(its.fileno())],
            pass_fds=[its.fileno()],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C of the terminal is not for it
        )
    return PreparedProcess(
        mine, process.pid, os.environ if environment is None else environment, process
    )


class ForkedChild:
    """A fork as `subprocess.Popen` shows a process: its public methods that need no pipe."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            self._reap(os.WNOHANG)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it runs still after `timeout` seconds.
        """
        if timeout is None:
            while self.returncode is None:
                self._reap(0)
            return self.returncode
        deadline = time.monotonic() + timeout
        pause = 0.0005
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(pause)
            pause = min(2 * pause, 0.005)  # a restart waits for the end of those it replaces
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM)."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process (SIGKILL)."""
        self.send_signal(signal.SIGKILL)

    def _reap(self, options: int) -> None:
        try:
            pid, status = os.waitpid(self.pid, options)
        except ChildProcessError:  # somebody else has waited for it
            self.returncode = 0
            return
        if pid == self.pid:
            self.returncode = os.waitstatus_to_exitcode(status)
