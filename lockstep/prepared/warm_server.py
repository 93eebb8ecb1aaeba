"""The warm process: a prepared process that outlives the command that started it.

    python -m lockstep.prepared.warm_server SOCKET IDLE_MINUTES

It has one thread, and waits for three things: a message, the end of a fork, and the end of its idle
time. A command whose sender is gone is killed, as it would have been with its terminal; one that
runs when the process itself is killed ends with it.

Tests: tests/prepared/test_warm.py
"""

import ctypes
import json
import os
import selectors
import signal
import socket
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.machine.signals import Inherited
from lockstep.prepared import fork_server, warm
from lockstep.prepared.process import MESSAGE_BYTES, ForkRequest

_PR_SET_PDEATHSIG = 1


class _Command:
    """A command that runs: its process, and the connection of the one that asked."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection


class WarmServer:
    """Runs commands as forks, until nobody has asked for so long.

    Args:
        path: of the socket.
        idle_minutes: how long.
        surroundings: this process's when it began; what it imported may have set variables.
        reason: why it can make no forks, if it can't.
    """

    def __init__(
        self, path: Path, idle_minutes: float, surroundings: dict[str, str], reason: str | None
    ) -> None:
        self._path = path
        self._idle_minutes = idle_minutes
        self._reason = reason
        self._surroundings = surroundings
        self._commands: list[_Command] = []
        self._count = 0
        self._stopping = False
        self._idle_since = time.monotonic()
        self._listener = self._listen()
        self._woken, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _listen(self) -> socket.socket:
        """Bind under another name, then rename: the address always leads to one of the two."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        new = self._path.with_suffix(f".{os.getpid()}")
        with warm.short_name(new) as name:
            listener.bind(name)
        new.chmod(0o600)
        listener.listen(16)
        new.rename(self._path)
        self._inode = self._path.stat().st_ino
        return listener

    def serve(self) -> tuple[ForkRequest, list[int], int] | None:
        """Serve until the idle time is over: None.

        In a fork: what it runs, its streams, and its mask for new files.
        """
        while not (self._ended() or self._replaced()):
            for key, _ in self._selector.select(self._seconds_to_wait()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._woken:
                    os.read(self._woken, 4096)
                elif (started := self._hear(key.fileobj)) is not None:  # type: ignore[arg-type]
                    return started
            self._reap()
        self._leave()
        return None

    def _ended(self) -> bool:
        idle = time.monotonic() - self._idle_since > 60 * self._idle_minutes
        return not self._commands and (self._stopping or idle)

    def _replaced(self) -> bool:
        """Return whether another warm process has taken the socket, and nothing runs here."""
        with suppress(OSError):
            return self._path.stat().st_ino != self._inode and not self._commands
        return not self._commands

    def _seconds_to_wait(self) -> float:
        if self._commands:
            return 60.0
        return max(0.0, min(60.0, self._idle_since + 60 * self._idle_minutes - time.monotonic()))

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        if warm.peer_user(connection) != os.getuid():
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ)

    def _hear(self, connection: socket.socket) -> tuple[ForkRequest, list[int], int] | None:
        """Answer one message; in a fork, return what it runs."""
        command = next((c for c in self._commands if c.connection is connection), None)
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 3)
        try:
            if not message:
                self._selector.unregister(connection)
                connection.close()
                if command is not None:  # whoever asked is gone
                    os.kill(command.pid, signal.SIGKILL)
                return None
            asked = json.loads(message)
            if command is not None:
                os.kill(command.pid, int(asked["signal"]))
                return None
            return self._answer(connection, asked, descriptors)
        finally:
            for descriptor in descriptors:
                with suppress(OSError):  # a fork has them as its streams
                    os.close(descriptor)

    def _answer(
        self, connection: socket.socket, asked: dict[str, Any], descriptors: list[int]
    ) -> tuple[ForkRequest, list[int], int] | None:
        """Answer what was asked; in a fork, return what it runs."""
        if asked["ask"] == "status":
            connection.send(warm.as_answer(self._status()))
            return None
        if asked["ask"] == "stop":
            self._stopping = True
            with suppress(FileNotFoundError):
                self._path.unlink()
            connection.send(b'{"stopping": true}')
            return None
        differs = self._difference(asked["surroundings"])
        if differs is not None:
            answer = {"differs": differs, "idle_minutes": self._idle_minutes}
            connection.send(json.dumps(answer).encode())
            return None
        request = ForkRequest(
            module="lockstep",
            arguments=asked["arguments"],
            environment=asked["environment"],
            folder=asked["folder"],
            parent=os.getpid(),
            inherited=Inherited(*map(frozenset, asked["signals"])),
            makes_forks=True,
        )
        pid = os.fork()
        if pid == 0:
            kept = [os.dup(descriptor) for descriptor in descriptors]
            self._forget()
            return request, kept, asked["umask"]
        self._count += 1
        self._commands.append(_Command(pid, connection))
        connection.send(b'{"started": true}')
        return None

    def _difference(self, theirs: dict[str, str]) -> str | None:
        """Return the name of what differs between a command's surroundings and this process's."""
        if self._reason is not None:
            return f"way to start ({self._reason})"
        for name in sorted(theirs.keys() | self._surroundings.keys()):
            if theirs.get(name) != self._surroundings.get(name):
                return name
        return None

    def _status(self) -> warm.Status:
        import psutil

        return warm.Status(
            os.getpid(),
            self._idle_minutes,
            self._count,
            len(self._commands),
            psutil.Process().memory_info().rss,
        )

    def _reap(self) -> None:
        """Tell those who asked how their commands have ended."""
        for command in list(self._commands):
            pid, status = os.waitpid(command.pid, os.WNOHANG)
            if not pid:
                continue
            self._commands.remove(command)
            self._idle_since = time.monotonic()
            with suppress(OSError, KeyError, ValueError):  # whoever asked may be gone
                self._selector.unregister(command.connection)
                answer = {"code": os.waitstatus_to_exitcode(status)}
                command.connection.send(json.dumps(answer).encode())
            command.connection.close()

    def _forget(self) -> None:
        """Close in a fork what is the server's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        os.close(self._woken)
        os.close(self._wake)

    def _leave(self) -> None:
        with suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()


def main() -> None:
    """Import, serve, and run a command in each fork."""
    path = Path(sys.argv[1])
    idle_minutes = float(sys.argv[2])
    surroundings = warm.surroundings()
    fork_server.leave_forks_at_once()
    fork_server.import_all()
    reason = fork_server.why_not_fork()
    started = WarmServer(path, idle_minutes, surroundings, reason).serve()
    if started is None:
        return
    request, descriptors, mask = started
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.setsid()
    os.umask(mask)
    fork_server.lead_forks(partial(fork_server.become, request, descriptors))


if __name__ == "__main__":
    from lockstep.prepared import warm_server

    warm_server.main()
