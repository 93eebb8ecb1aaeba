"""The prepared process: imports torch and Lockstep, then forks what is asked for.

    python -m lockstep.prepared.fork_server DESCRIPTOR

`DESCRIPTOR` is its end of the channel that `prepared` made. A fork runs a module as `python -m`
does, and becomes a child of the process that asked: it is the child of a process that ends at once,
and that process's descendants go to the nearest ancestor that adopts orphans.

    asks ── request ──> server ── fork ──> middle ── fork ──> the new process
      │  <── its pid ──────┘                 └ ends                    │
      └──────────────── is its parent from then on ────────────────────┘

Tests: tests/prepared/test_process.py
"""

import atexit
import functools
import gc
import importlib
import logging
import os
import pickle
import runpy
import select
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.machine import cores, scratch, signals
from lockstep.machine.output import flush_both
from lockstep.machine.processes import is_running
from lockstep.prepared.process import (
    COMES_AGAIN,
    MESSAGE_BYTES,
    NONE_COMES,
    ForkRequest,
    PreparedProcess,
    adopt_orphans,
    give,
    own_prepared_process,
)

# What a launcher has imported, and a rank at its first step.
_IMPORTED = (
    "lockstep.cli",
    "lockstep.config",
    "lockstep.trainer",
    "lockstep.parallel.axes.context",
    "lockstep.parallel.axes.expert",
    "lockstep.parallel.axes.tensor",
    "lockstep.parallel.replicas.ddp",
    "lockstep.parallel.fsdp.sharding",
    "lockstep.diagnose.doctor",
    "lockstep.launch.agent",
    "lockstep.failures.explanations",
    "lockstep.launch.rendezvous_handlers",
    "lockstep.launch.script",
    "lockstep.launch.train",
    "lockstep.prepared.warm",
    "lockstep.plan.command",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.utils.flop_counter",
)
# Files that a process has open once it uses an accelerator.
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/accel", "/dev/dri")
# After so long without a request, forks are made ready for the next.
_IDLE_SECONDS = 2.0
# Threads of libraries that see to forks by themselves: of pyarrow's allocator.
_SAFE_THREADS = ("jemalloc_bg_thd",)
# How this process ends, if it is a fork: its exit code, or the signal that ends it below 0.
_exit_code: int | None = None


def _end_at_once() -> None:
    """End a fork as the interpreter would, but for taking all modules apart.

    That would copy the memory that it shares with the prepared process.
    """
    if _exit_code is None:
        return
    logging.shutdown()
    scratch.remove_all()  # registered before this function, and so not called yet
    flush_both()
    if _exit_code < 0:
        signal.signal(-_exit_code, signal.SIG_DFL)
        os.kill(os.getpid(), -_exit_code)
    os._exit(_exit_code)


class _ForkedError(BaseException):
    """Leads a fork out of the server's loop."""


class _PreparedError(BaseException):
    """Leads a prepared process out of the command that it is a fork of."""


# whether this process runs a command in `run`
_runs_command = False
# what Python put before the folders of modules for the program that this process began with
_first_folder: str | None = None


def run(command: Callable[[], int]) -> int:
    """Run a command, which may `split_off` a prepared process; return its exit code."""
    global _runs_command, _first_folder
    _runs_command = True
    _first_folder = None if sys.flags.safe_path else sys.path[0]
    leave_forks_at_once()
    codes: list[int] = []
    lead_forks(lambda: codes.append(command()))
    return codes[0]


def split_off(*, compiles: bool = False, also: Sequence[str] = ()) -> str | None:
    """Import what ranks use, and fork a prepared process off this one, if it runs a command.

    `also`: further modules that ranks import, of libraries; what can't be imported is left to them.

    The two have imported once between them. It goes on from `run`, so that nothing of the command
    is left in it; call this before the command has loaded modules of the user's, opened devices or
    made folders. If nothing is known to be compiled, torch's compiler is not imported before it is
    needed. Return why ranks must be fresh processes, or None: this process has a prepared
    one, or can start one.
    """
    if own_prepared_process() is not None or not _runs_command or not adopt_orphans():
        return None
    before = dict(os.environ)
    usual = _import_for_ranks if compiles else _import_without_compiler
    import_all(functools.partial(_import_more, usual, also))
    if os.environ != before:  # torch's compiler sets variables, which ranks should not find
        os.environ.clear()
        os.environ.update(before)
    with signals.without_thread():
        reason = why_not_fork()
        if reason is None:
            flush_both()
            give(_fork_of_this_process())
    return reason


def main(imports: Callable[[], None] | None = None) -> None:
    """Import, serve, and run what was asked for in each fork; `imports` in place of the usual."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    leave_forks_at_once()
    import_all(imports)
    lead_forks(functools.partial(_serve, channel, why_not_fork()))


@functools.cache
def leave_forks_at_once() -> None:
    """Have forks end without taking all modules apart, after what else runs at the end."""
    atexit.register(_end_at_once)  # the first that is registered is called last


def lead_forks(work: Callable[[], None]) -> None:
    """Work; a fork of this process leaves its work, and goes on with its own from here."""
    while True:
        try:
            work()
            return
        except _ForkedError as fork:
            work = functools.partial(become, *fork.args)
        except _PreparedError as fork:
            work = functools.partial(_serve, *fork.args)


def import_all(imports: Callable[[], None] | None = None) -> None:
    """Import what ranks use, or by `imports`, faster than a program of its own would."""
    logging.disable(logging.WARNING)  # torchao tells of kernels for other uses that do not load
    gc.disable()  # collections find nothing in what is imported
    try:
        (imports or _import_for_ranks)()
    finally:
        logging.disable(logging.NOTSET)
    gc.freeze()  # else collections look at what was imported again and again, and unshare it
    gc.enable()


def _import_for_ranks() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    verdicts = importlib.import_module("lockstep.diagnose.verdicts")
    verdicts.own_code()  # read once for all ranks, as is the version
    verdicts.own_version()


def _import_without_compiler() -> None:
    from lockstep.torch_compat.compiler_loading import put_off

    put_off()
    _import_for_ranks()


def _import_more(usual: Callable[[], None], also: Sequence[str]) -> None:
    usual()
    for name in also:
        with suppress(Exception):
            importlib.import_module(name)


def _threads() -> int:
    """Return the threads of this process, but for those that forks are safe from."""
    number = 0
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):  # it has ended meanwhile
            name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
            number += name not in _SAFE_THREADS
    return number


def _end_threads_that_expect_forks() -> None:
    """Fork once, for nothing: libraries whose threads can't be forked end them before a fork.

    So does the OpenBLAS of numpy and of scipy; it starts them again when it needs them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forks with threads
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def why_not_fork() -> str | None:
    """Return what makes forks of this process unsafe, or None."""
    import torch

    _end_threads_that_expect_forks()
    if (number := _threads() - 1) > 0:
        return f"what was imported has started {number} thread{'s' * (number != 1)}"
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:  # that of the listing itself
            continue
        if target.startswith(_DEVICES):
            return f"what was imported has opened {target}"
    ours = torch.default_generator
    unused = torch.Generator().manual_seed(ours.initial_seed())
    if not torch.equal(ours.get_state(), unused.get_state()):
        return "what was imported has drawn random numbers"
    return None


def _serve(channel: socket.socket, reason: str | None = None) -> None:
    """Fork what is asked for, until nobody can ask any more; raises `_ForkedError` in the forks."""
    # a fork begins so, as a fresh process might
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.ASKS_TO_END)
    ready: list[_ReadyFork] = []
    asked = 0  # how many of the latest requests, one after another, may come again
    was_idle = False
    while True:
        patience: float | None = 0.0 if was_idle else _IDLE_SECONDS
        if len(ready) >= asked:
            patience = None
        if not select.select([channel], [], [], patience)[0]:
            was_idle = True
            ready.append(_fork_ready(channel, ready))
            continue
        message, descriptors, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
        if not message:
            os._exit(0)  # and so does each fork that is ready
        if was_idle or message == NONE_COMES:
            was_idle = False
            asked = 0
        if message == NONE_COMES:
            for fork in ready:
                fork.channel.close()
            ready.clear()
            continue
        if reason is None:
            asked += message.startswith(COMES_AGAIN)
            given = _give_work(ready, message, descriptors)
            channel.send(given or _fork(channel, ready, message, descriptors))
        else:
            channel.send(reason.encode())
        for descriptor in descriptors:
            os.close(descriptor)


@dataclass(frozen=True)
class _ReadyFork:
    """A fork that waits for what it shall run, and ends if the prepared process does."""

    channel: socket.socket
    pid: bytes


def _fork_ready(channel: socket.socket, ready: Sequence[_ReadyFork]) -> _ReadyFork:
    """Return a fork that waits for its request. Raises `_ForkedError` in it, once it has it."""
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = _fork_orphan()
    if pid is None:
        for held in (channel, mine, *(fork.channel for fork in ready)):
            held.close()
        message, descriptors, _, _ = socket.recv_fds(its, MESSAGE_BYTES, 3)
        its.close()
        if not message:
            os._exit(0)
        raise _ForkedError(_request_in(message), descriptors)
    its.close()
    return _ReadyFork(mine, pid)


def _give_work(ready: list[_ReadyFork], message: bytes, descriptors: Sequence[int]) -> bytes | None:
    """Have a fork that is ready run what is asked for; return its process id, None if none is."""
    while ready:
        fork = ready.pop(0)
        with fork.channel, suppress(OSError):  # it was killed
            socket.send_fds(fork.channel, [message], descriptors)
            return fork.pid
    return None


def _fork(
    channel: socket.socket,
    ready: Sequence[_ReadyFork],
    message: bytes,
    descriptors: Sequence[int],
) -> bytes:
    """Return the process id of the fork, as text. Raises `_ForkedError` in it."""
    pid = _fork_orphan()
    if pid is None:
        for held in (channel, *(fork.channel for fork in ready)):
            held.close()
        raise _ForkedError(_request_in(message), descriptors)
    return pid


def _fork_orphan() -> bytes | None:
    """Fork a process that goes to the one that asks; return its id, as text, and in it None.

    It leads a session of its own before anybody knows its id: whoever starts a process so may send
    a signal to its group at once, and finds one.
    """
    read, write = os.pipe()
    middle = os.fork()  # which ends at once, so that its child goes to the process that asked
    if middle == 0:
        if os.fork():
            os._exit(0)
        os.setsid()
        os.write(write, str(os.getpid()).encode())
        os.close(read)
        os.close(write)
        return None
    os.waitpid(middle, 0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        return answer.read()


def _request_in(message: bytes) -> ForkRequest:
    request: ForkRequest = pickle.loads(message[1:])
    return request


def become(request: ForkRequest, descriptors: Sequence[int]) -> None:
    """Run the module as `python -m` does, to the end of this process."""
    while os.getppid() != request.parent:
        if not is_running(request.parent):
            os._exit(1)  # who asked was killed meanwhile, and nobody waits for this process
        time.sleep(0.001)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    request.inherited.take()
    streams = _streams(at_once=bool(request.environment.get("PYTHONUNBUFFERED")))
    for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if request.first is not None:
        request.first()
    here = os.getcwd()
    os.chdir(request.folder)
    _take_environment(request, here)
    _unlike_others()
    if request.makes_forks:
        adopt_orphans()
        give(_fork_of_this_process())
    # a package's `__main__` runs; a module runs anew itself
    if not hasattr(sys.modules.get(request.module), "__path__"):
        sys.modules.pop(request.module, None)
    sys.argv[1:] = request.arguments
    _run(request.module)


def _run(module: str) -> None:
    """Run a module, and note how this process ends."""
    global _exit_code
    _exit_code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        _exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        _exit_code = -signal.SIGINT
        raise
    _exit_code = 0
    sys.exit()


def _take_environment(request: ForkRequest, server_folder: str) -> None:
    """Replace the variables, and the folders of modules that depend on them."""
    variables = request.environment
    ours = {"", server_folder, _first_folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
    theirs = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
    rest = (path for path in sys.path if path not in ours)
    first = [] if sys.flags.safe_path else [request.folder]
    # each once, as `site` leaves them
    sys.path[:] = dict.fromkeys([*first, *map(os.path.abspath, theirs), *rest])
    importlib.invalidate_caches()
    os.environ.clear()
    os.environ.update(variables)


def _streams(*, at_once: bool) -> tuple[Any, Any, Any]:
    """Return stdin, stdout and stderr on the descriptors 0, 1 and 2, as Python opens them."""
    kept: Any = {"encoding": sys.stdout.encoding, "closefd": False}
    out: Any = open(1, "w", buffering=1, errors=sys.stdout.errors, **kept)  # noqa: SIM115
    err = open(2, "w", buffering=1, errors="backslashreplace", **kept)  # noqa: SIM115
    out.reconfigure(line_buffering=out.isatty(), write_through=at_once)
    return open(0, **kept), out, err


def _unlike_others() -> None:
    """Give the fork what a fresh process has of its own: seeds, and its number of threads.

    Python seeds its own generator in each fork.
    """
    import numpy as np
    import torch

    np.random.seed()
    torch.default_generator.seed()
    cores.threads_after_fork()
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdecimal() and int(asked) > 0:  # the libraries read it when they were loaded
        cores.set_threads(int(asked))


def _fork_of_this_process() -> PreparedProcess:
    """Fork a prepared process off this one, which has no threads yet: it has all its imports.

    Raises `_PreparedError` in it.
    """
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        its.close()
        return PreparedProcess(mine, pid, os.environ)
    os.setsid()  # a signal to the group of the process that it serves is not for this one
    mine.close()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    os.close(nowhere)
    raise _PreparedError(its)


if __name__ == "__main__":
    # not this module, which is `__main__`: requests name their classes by module
    from lockstep.prepared import fork_server

    fork_server.main()
