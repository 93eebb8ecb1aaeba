"""A launcher for the kill bench whose processes are forked, not started: they have torch and
Lockstep loaded already.

It does what `lockstep train --nproc-per-node 2 --max-restarts 50` does for the ranks, in a fiftieth
of the time: ranks die with it, and are started anew together when one of them fails. A rank is a
whole `lockstep train` under a launcher. The process that forks must not have started threads, used
CUDA or drawn random numbers.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import lockstep.trainer  # noqa: F401  # what ranks load
import tests.faults.tiny  # noqa: F401
from lockstep.cli import main
from lockstep.launch.worker import LAUNCHER_PID
from lockstep.run_directory.records import RunDirectory

RESTARTS = 50
_PR_SET_PDEATHSIG = 1


class Forked:
    """A forked launcher with its ranks; as much of `subprocess.Popen` as the bench needs.

    Args:
        command: of `lockstep`, with `--output-dir` last.
        ranks: how many.
        environment: more variables.
    """

    def __init__(self, command: Sequence[object], ranks: int, **environment: str) -> None:
        self.returncode: int | None = None
        bench = os.getpid()
        self.pid = os.fork()
        # both do it, so that the group is there whoever comes first; the other one may be done
        with suppress(OSError):
            os.setpgid(self.pid, self.pid)
        if self.pid == 0:
            _die_with(bench)
            os.environ.update({"OMP_NUM_THREADS": "1", **environment})
            os._exit(_launch([str(word) for word in command], ranks))

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        code = self._look(0)
        assert code is not None
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _launch(command: list[str], ranks: int) -> int:
    run = RunDirectory(Path(command[-1]))
    for attempt in range(RESTARTS + 1):
        port = _free_port()
        left = {_rank(command, rank, ranks, port, attempt) for rank in range(ranks)}
        failed = False
        while left:
            pid, status = os.wait()
            left.discard(pid)
            if status and not failed:
                failed = True
                for other in left:
                    os.kill(other, signal.SIGKILL)
        if not failed:
            return 0
        run.path.mkdir(parents=True, exist_ok=True)
        run.append_event("restart", reason="a rank failed", left=RESTARTS - attempt)
    return 1


def _rank(command: list[str], rank: int, ranks: int, port: int, attempt: int) -> int:
    launcher = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    own = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": attempt,
        LAUNCHER_PID: launcher,
    }
    os.environ.update({name: str(value) for name, value in own.items()})
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    os._exit(main(command))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
