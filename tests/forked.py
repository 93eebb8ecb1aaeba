"""Starts `python -m MODULE …` as a fork of a server that has imported torch and Lockstep: `Forked`
in place of Popen.

Importing both takes three to four seconds of a core for each process, more than most tests that
start some. A fork is otherwise as a fresh process: a child of the one that asked for it, with the
arguments, variables, folder and descriptors of its own; where it is a launcher, its ranks are forks
too. What it shares with the server are imported modules. Tests of how a process starts, of threads
and of the heap start fresh ones; a process with other variables that Python reads only when it
starts is a fresh one, too.
"""

import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.prepared import process as prepared
from lockstep.prepared.process import ForkRequest, PreparedProcess
from tests.hosts import REPOSITORY, Host

TORCHRUN = "torch.distributed.run"
PYTEST_WORKER = "tests.pytest_worker"  # the module that such a worker runs
_started: list[PreparedProcess] = []  # this process's, once it has asked for a fork


def prepared_process() -> PreparedProcess:
    """Return what makes forks for tests in this process; it is started when it is first needed."""
    own = prepared.own_prepared_process()
    if own is not None:
        return own
    if not _started:
        path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        # with its own pool, pyarrow starts a thread as it is imported, in some of its versions
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "ARROW_DEFAULT_MEMORY_POOL": "system",
        }
        _started.append(
            prepared.start("tests.forked", folder=str(REPOSITORY), environment=environment)
        )
    return _started[0]


def is_server(pid: int) -> bool:
    """Whether this process started that one to make its forks."""
    own = prepared.own_prepared_process()
    return pid in [known.pid for known in (*_started, *([own] if own else []))]


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
        bound = inspect.signature(super()._execute_child).bind(*given)  # type: ignore[misc]
        its = bound.arguments
        assert (its["preexec_fn"], its["pass_fds"]) == (None, ())
        umask = its["umask"]
        assert self._host is None or umask == -1
        sys.audit("subprocess.Popen", sys.executable, its["args"], its["cwd"], its["env"])
        module, *arguments = (str(word) for word in its["args"][2:])
        environment = dict(os.environ if its["env"] is None else its["env"])
        request = ForkRequest(
            module="tests.torchrun" if module == TORCHRUN else module,
            arguments=arguments,
            environment=environment,
            folder=os.fspath(its["cwd"] or os.getcwd()),
            parent=os.getpid(),
            makes_forks=_makes_forks(module, arguments, environment),
            first=(
                partial(self._host.enter, self._host_name)
                if self._host is not None
                else (None if umask == -1 else partial(os.umask, umask))
            ),
        )
        server = prepared_process()
        if server.why_not(environment) is not None:
            its["preexec_fn"] = request.first
            super()._execute_child(*bound.args)  # type: ignore[misc]
            return
        sides = [
            its[side]
            for side in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        ]
        child = sides[0], sides[3], sides[5]
        try:
            self.pid = server.fork(
                request, [own if side == -1 else side for own, side in enumerate(child)]
            )
        except prepared.CannotForkError as error:
            if self._host is not None:
                raise
            # some library starts threads as it is imported: slower, and right all the same
            warnings.warn(f"fresh processes, not forks: {error}", stacklevel=2)
            super()._execute_child(*given)  # type: ignore[misc]
            return
        except BaseException:
            self._close_pipe_fds(*sides)  # type: ignore[attr-defined]
            raise
        self._child_created = True
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


def _makes_forks(module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a process starts ranks, or tests."""
    launches = module == "lockstep" and arguments[0] in ("train", "launch")
    return module in (PYTEST_WORKER, TORCHRUN) or (launches and "RANK" not in environment)


if __name__ == "__main__":
    import importlib

    from lockstep.prepared import fork_server

    fork_server.main(lambda: importlib.import_module("tests.preloaded"))
