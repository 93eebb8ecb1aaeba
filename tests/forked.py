"""Starts `python -m MODULE …` as a fork of a server that has imported torch and Lockstep: `Forked`
in place of Popen.

Importing both takes three to four seconds of a core for each process, more than most tests that
start some. A fork is otherwise as a fresh process: a child of the one that asked for it, with the
arguments, variables, folder and descriptors of its own; where it is a launcher, its ranks are forks
too. What it shares with the server are imported modules. Tests of how a process starts, of threads
and of the heap start fresh ones.
"""

import atexit
import ctypes
import functools
import inspect
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep import signals
from lockstep.cores import threads_after_fork
from tests.hosts import REPOSITORY, Host

TORCHRUN = "torch.distributed.run"
PYTEST_WORKER = "tests.pytest_worker"  # the module that such a worker runs
# of linux/prctl.h: orphans among its descendants become this process's children
_PR_SET_CHILD_SUBREAPER = 36
_MESSAGE_BYTES = 200_000


@dataclass(frozen=True)
class _Request:
    """What the server is asked for.

    Attributes:
        words: after `python -m`.
        parent: the process whose child it becomes.
        own_session: as `start_new_session` of Popen.
        blocked: signals that it holds back, which are those of the process that asks.
        host, host_name: where it goes first, and what that host calls itself there.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    folder: str
    parent: int
    own_session: bool
    blocked: Set[signal.Signals | int]
    host: Host | None
    host_name: str | None


class _Server:
    """A process with one thread that has imported what its forks need, and the channel to it."""

    def __init__(self) -> None:
        if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError("forks can't be made children of this process")
        self._lock = threading.Lock()
        self._channel, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = self._start(its)
        its.close()

    def _start(self, its: socket.socket) -> int:
        """Start the server as a fresh process; it ends when nobody holds the channel any more."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(its.fileno())],
            pass_fds=[its.fileno()],
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={
                **os.environ,
                "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            },
        )
        return self._process.pid

    def fork(self, request: _Request, descriptors: Sequence[int]) -> int:
        """Return the process id of a new child of this process, whose first three descriptors are
        these.
        """
        with self._lock:
            socket.send_fds(self._channel, [pickle.dumps(request)], descriptors)
            answer = self._channel.recv(_MESSAGE_BYTES)
        assert answer, "the server of forks has ended"
        return int(answer)


class _OwnFork(_Server):
    """A fork of a launcher or a worker of pytest, before it has threads: what it has imported, its
    forks have.
    """

    def _start(self, its: socket.socket) -> int:
        pid = os.fork()
        if pid:
            return pid
        _servers.clear()
        os.setsid()  # a signal to the group of the process that it serves is not for the server
        self._channel.close()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nowhere, number)
        _serve(its)


_servers: list[_Server] = []  # this process's, once it has asked for a fork


def _server() -> _Server:
    if not _servers:
        _servers.append(_Server())
    return _servers[0]


def is_server(pid: int) -> bool:
    """Whether this process started that one to make its forks."""
    return pid in [server.pid for server in _servers]


class Forked(subprocess.Popen[str]):
    """`Popen([sys.executable, "-m", MODULE, …], …)`.

    Args:
        command: as above.
        host: where it runs; unset: on this one.
        host_name: what that host calls itself, which nobody can resolve; unset: as this one.
        more: for Popen.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        host: Host | None = None,
        host_name: str | None = None,
        **more: Any,
    ) -> None:
        assert command[:2] == [sys.executable, "-m"], command
        self._host = host
        self._host_name = host_name
        super().__init__(command, **more)

    def _execute_child(self, *given: Any) -> None:
        its = inspect.signature(super()._execute_child).bind(*given).arguments  # type: ignore[misc]
        assert (its["preexec_fn"], its["pass_fds"]) == (None, ())
        sys.audit("subprocess.Popen", sys.executable, its["args"], its["cwd"], its["env"])
        request = _Request(
            words=[str(word) for word in its["args"][2:]],
            environment=dict(os.environ if its["env"] is None else its["env"]),
            folder=os.fspath(its["cwd"] or os.getcwd()),
            parent=os.getpid(),
            own_session=its["start_new_session"],
            blocked=signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            host=self._host,
            host_name=self._host_name,
        )
        sides = [
            its[side]
            for side in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ]
        child = sides[0], sides[3], sides[5]
        try:
            self.pid = _server().fork(
                request, [own if side == -1 else side for own, side in enumerate(child)]
            )
            self._child_created = True
        finally:
            self._close_pipe_fds(*sides)  # type: ignore[attr-defined]


def lockstep(
    words: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> "subprocess.CompletedProcess[str]":
    """Run `lockstep WORDS` to its end in a folder, with these variables and no others; five minutes
    are allowed.
    """
    process = Forked(
        [sys.executable, "-m", "lockstep", *words],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return subprocess.CompletedProcess(list(words), process.returncode, out, err)


# ---- in the server, and in its forks ----


class _ForkedError(BaseException):
    """Leads a fork out of the server's loop."""


def _serve(channel: socket.socket) -> None:
    """Fork what is asked for, until nobody can ask any more; raises `_ForkedError` in the forks."""
    # a fork begins so, as a fresh process might
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.ASKS_TO_END)
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)
        read, write = os.pipe()
        middle = os.fork()  # which ends at once, so that its child goes to the process that asked
        if middle == 0:
            pid = os.fork()
            if pid:
                os.write(write, str(pid).encode())
                os._exit(0)
            channel.close()
            os.close(read)
            os.close(write)
            raise _ForkedError(pickle.loads(message), descriptors)
        os.waitpid(middle, 0)
        channel.send(os.read(read, 100))
        for descriptor in (read, write, *descriptors):
            os.close(descriptor)


def _become(request: _Request, descriptors: Sequence[int]) -> None:
    """Run the module as `python -m` does."""
    while os.getppid() != request.parent:
        time.sleep(0.001)
    threads_after_fork()
    if request.own_session:
        os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.blocked)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__ = _streams(
        request.environment
    )
    inherited = {REPOSITORY.as_posix(), "", *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    sys.path[:] = [
        request.folder,
        *filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep)),
        *(path for path in sys.path if path not in inherited),
    ]
    os.environ.clear()
    os.environ.update(request.environment)
    if request.host is not None:
        request.host.enter(request.host_name)
    os.chdir(request.folder)
    module, *arguments = request.words
    launches = (
        module == "lockstep" and arguments[0] in ("train", "launch") and "RANK" not in os.environ
    )
    if module == PYTEST_WORKER:
        _servers.append(_OwnFork())
    elif launches or module == TORCHRUN:
        _fork_ranks()
    # a package's `__main__` runs; a module runs anew itself
    if not hasattr(sys.modules.get(module), "__path__"):
        sys.modules.pop(module, None)
    sys.argv[1:] = arguments
    code: object = None
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    # What a process does in the end, but for taking all modules apart: that copies the memory
    # shared with the server.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not isinstance(code, int | None):
        print(code, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _streams(environment: Mapping[str, str]) -> tuple[Any, Any, Any]:
    at_once = bool(environment.get("PYTHONUNBUFFERED"))
    out, err = (
        open(n, "w", buffering=1, encoding="utf-8", errors=how, closefd=False)  # noqa: SIM115
        for n, how in ((1, "strict"), (2, "backslashreplace"))
    )
    out.reconfigure(line_buffering=out.isatty(), write_through=at_once)
    return open(0, encoding="utf-8", closefd=False), out, err


def _fork_ranks() -> None:
    """Make a server of this launcher's own, and torch's agent start its processes there."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import (
        SubprocessHandler,
    )

    _servers.append(_OwnFork())

    def popen(self: Any, command: Sequence[str], environment: dict[str, str]) -> Forked:
        python, *words = command
        if words[0] == "-u":  # as torchrun starts them
            words = words[1:]
            environment = environment | {"PYTHONUNBUFFERED": "1"}
        streams = {"stdout": self._stdout, "stderr": self._stderr}
        return Forked([python, *words], env=environment, **streams, start_new_session=True)

    SubprocessHandler._popen = popen


if __name__ == "__main__":
    import importlib
    import logging

    # torchao tells of kernels for other uses that do not load here
    logging.disable(logging.WARNING)
    importlib.import_module("tests.preloaded")
    logging.disable(logging.NOTSET)
    # not this module, which is `__main__`: requests name their classes by module
    from tests import forked

    work = functools.partial(forked._serve, socket.socket(fileno=int(sys.argv[1])))
    while True:
        try:
            work()
            break
        except forked._ForkedError as fork:
            work = functools.partial(forked._become, *fork.args)
