"""Implements `lockstep.spawn`: starts ranks from a script or a notebook, each running a function.

From a script, or for a function in a module, ranks are fresh processes. In a notebook the function
is in no file that a fresh process could import, so ranks are forks. An accelerator in use forbids a
fork; `spawn` raises then.
"""

import datetime
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from shlex import quote
from typing import Any

from lockstep.errors import EXIT_USAGE, UsageError
from lockstep.failures.failure import Failure, first_cause, from_exception, from_exit_code, read_all
from lockstep.files.paths import local_path
from lockstep.heartbeat.writer import own_heartbeat
from lockstep.launch.worker import FAILURES, LAUNCHER_PID, die_with_parent, environment_with
from lockstep.machine import cores
from lockstep.machine.environment import rank_facts
from lockstep.machine.network import DEFAULT_PORT
from lockstep.machine.output import flush_both
from lockstep.machine.scratch import remove, scratch_folder
from lockstep.prepared.forked_rank import ForkedRank, can_be_awaited, handed_over
from lockstep.prepared.process import own_prepared_process
from lockstep.report.read import read_run
from lockstep.report.sketch import sketch

_MODULE = "lockstep.launch.spawn"  # this one, also where it is `__main__`
# how ranks start, beside the other methods of `multiprocessing`
_FORKSERVER = "forkserver"
_LAST = "lockstep.prepared.preloaded"  # of what a server of `multiprocessing` imports
_PREPARED = "prepared"
_DRAWING_SECONDS = 1.0  # between two drawings of `plot`
_CAUSE_SECONDS = 5.0  # how long to wait for the cause when only consequences are known


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
    plot: str | Path | None = None,
) -> None:
    """Run `fn(*args)` on `nprocs` ranks of this machine, and return when all are done.

    A rank knows its place from `lockstep.rank()`, and joins the others with `lockstep.setup()` or
    by making a `Trainer`. Its number is node_rank · nprocs + its index here. One process on one
    machine runs in this one. From a script, `fn` is a function that it defines at its top level.
    `nprocs` unset: all visible GPUs, else 1. Of `nnodes` machines every one calls `spawn` with the
    same arguments but its own `node_rank`, from 0; `master_addr` is the machine with node_rank 0,
    and `master_port` a free port there. In a notebook, `plot` is the run directory that `fn` trains
    into, which is drawn below the cell while it runs.

    The first error of a rank is raised once, as a LockstepError; a UsageError if the numbers don't
    fit, or there is no way to start `fn` in another process.
    """
    _check_not_importing_main()
    _check_arguments(fn, args, nprocs)
    if nprocs is None:
        from lockstep.launch.options import count_gpus

        nprocs = max(1, count_gpus())
    if nprocs < 1 or nnodes < 1:
        raise UsageError(
            f"nprocs={nprocs} on nnodes={nnodes} is not a number of ranks", where="spawn"
        )
    if not 0 <= node_rank < nnodes:
        raise UsageError(f"node_rank={node_rank} is not below nnodes={nnodes}", where="spawn")
    if nnodes > 1 and master_addr is None:
        raise UsageError(
            f"nnodes={nnodes} needs master_addr=, the machine with node_rank 0", where="spawn"
        )
    if nprocs == nnodes == 1 and plot is None:
        fn(*args)
        return
    _run_ranks(
        fn, args, _start_method(fn), plot, nprocs, nnodes, node_rank, master_addr, master_port
    )


def spawn_again(
    fn: Callable[..., Any], args: Sequence[Any], nprocs: int, *, preload: Sequence[str] | None
) -> None:
    """Run `fn(*args)`, of a module, on `nprocs` ranks, as `spawn` does.

    A single rank is a process of its own, too.

    With `preload`, names of modules, ranks are forks of a process that imports them once: from then
    on a rank starts in 0.1 s of a core, in place of 3 to 4. That is this command's prepared
    process, or else a server of `multiprocessing`. It uses no GPU, so its forks can. A rank has its
    own variables when `fn` is called; what is imported to find `fn` and its arguments sees those of
    the server.
    """
    _check_not_importing_main()
    prepared = own_prepared_process()
    if preload is None:
        method = _start_method(fn)
    elif prepared is not None and prepared.why_not(os.environ) is None and can_be_awaited():
        method = _PREPARED
    else:
        method = _FORKSERVER
        multiprocessing.get_context(_FORKSERVER).set_forkserver_preload([*preload, _LAST])
    _run_ranks(fn, args, method, None, nprocs)


def _run_ranks(
    fn: Callable[..., Any],
    args: Sequence[Any],
    method: str,
    plot: str | Path | None,
    nprocs: int,
    nnodes: int = 1,
    node_rank: int = 0,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> None:
    """Start the ranks, wait for them, and raise the first cause if one of them fails."""
    _check_environment(nprocs, nnodes, node_rank)
    common, store = _rendezvous_variables(nprocs, nnodes, node_rank, master_addr, master_port)
    ranks = range(node_rank * nprocs, (node_rank + 1) * nprocs)
    figure = None if plot is None else LivePlot(plot)
    folder = scratch_folder("failures")
    common |= {FAILURES: str(folder), LAUNCHER_PID: str(os.getpid())}
    processes: list[BaseProcess | ForkedRank] = []
    try:
        for local, rank in enumerate(ranks):
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(local)}
            with environment_with(environment):  # for what the child imports before `_run`
                # A server's environment is that of its start, so its forks are given the whole of
                # it.
                whole = method in (_FORKSERVER, _PREPARED)
                own = dict(os.environ) if whole else environment
                work = (fn, tuple(args), own, method)
                processes.append(_start(work, method, folder / f"work-{rank}"))
        _wait(processes, figure)
        cause = _cause(processes, ranks, int(common["WORLD_SIZE"]), folder)
    finally:
        # those that still run: peers of a failed rank, or all after an interrupt
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(2)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
        remove(folder)
        del store  # the ranks needed it
    if cause is not None:
        sys.stderr.write(cause.traceback)
        raise cause.error()


def _start(
    work: tuple[Callable[..., Any], tuple[Any, ...], dict[str, str], str], method: str, file: Path
) -> BaseProcess | ForkedRank:
    """Start a rank that runs `run_rank(*work)`, which `file` may hand over to it."""
    prepared = own_prepared_process() if method == _PREPARED else None
    if prepared is not None:
        return ForkedRank(prepared, _MODULE, work, work[2], file)
    context: Any = multiprocessing.get_context(method)
    process: BaseProcess = context.Process(target=run_rank, args=work, name=file.name)
    process.start()
    return process


def _check_arguments(fn: Any, args: Any, nprocs: Any) -> None:
    """Reject arguments in the order that other libraries' `spawn` takes them."""
    name = getattr(fn, "__name__", "train")
    if not callable(fn):
        raise UsageError(
            f"{fn!r} is not a function",
            where="spawn",
            fix="pass the function itself: spawn(train, …)",
        )
    if isinstance(args, int) and not isinstance(args, bool):
        text = (
            "the second argument of spawn is a tuple of the function's arguments, not the number"
            f" {args}"
        )
        fix = (
            f"lockstep.spawn({name}, nprocs={args}) starts {args} ranks; lockstep.spawn({name},"
            f" args=({args},), nprocs=…) calls {name}({args}) on each rank"
        )
        raise UsageError(text, where=f"spawn({name}, {args}, …)", fix=fix)
    if not isinstance(args, list | tuple):
        text = f"the function's arguments are a tuple, not a {type(args).__name__}"
        fix = (
            f"lockstep.spawn({name}, args=(value,), nprocs=…); the comma makes a tuple of one value"
        )
        raise UsageError(text, where=f"spawn({name}, {args!r:.60}, …)", fix=fix)
    if nprocs is not None and (not isinstance(nprocs, int) or isinstance(nprocs, bool)):
        text = f"nprocs is the number of ranks on this machine, not {nprocs!r:.60}"
        raise UsageError(
            text, where=f"spawn({name}, …)", fix=f"lockstep.spawn({name}, args=(…), nprocs=2)"
        )


def _check_environment(nprocs: int, nnodes: int, node_rank: int) -> None:
    """Reject rank numbers that contradict the environment's: each machine would train on its own.

    Its variables may number the machines (srun with a task a machine), or ranks: RANK is the first
    of this machine.
    """
    facts = rank_facts()
    machines = (facts.rank, facts.world_size) == (node_rank, nnodes)
    ranks = (facts.rank, facts.world_size) == (node_rank * nprocs, nnodes * nprocs)
    if facts.world_size == 1 or machines or ranks:
        return
    names = {"torchrun": "RANK and WORLD_SIZE", "srun": "SLURM_PROCID and SLURM_NTASKS"}
    what = (
        f"the environment says rank {facts.rank} of {facts.world_size}, but spawn would start ranks"
        f" {node_rank * nprocs} to {(node_rank + 1) * nprocs - 1} of {nprocs * nnodes}"
    )
    where = (
        f"{names.get(facts.launcher, 'the variables of mpirun')} in the environment;"
        f" spawn(nprocs={nprocs}, nnodes={nnodes}, node_rank={node_rank})"
    )
    why = "each process that calls spawn would make a world of its own, with a model of its own"
    num_machines, rest = divmod(facts.world_size, nprocs)
    index, local_rank = divmod(facts.rank, nprocs)
    address = os.environ.get("MASTER_ADDR", "the address of machine 0")
    fix = "where a launcher has started one process a rank, call the function itself, without spawn"
    if not rest and not local_rank:
        machine = (
            f"spawn(…, nprocs={nprocs}, nnodes={num_machines}, node_rank={index},"
            f" master_addr={address!r})"
        )
        fix = f"if RANK is the number of this machine's first rank: {machine}; {fix}"
    raise UsageError(what, where=where, why=why, fix=fix)


def _rendezvous_variables(
    nprocs: int, nnodes: int, node_rank: int, master_addr: str | None, master_port: int | None
) -> tuple[dict[str, str], Any]:
    """Return the variables that all ranks share, and the store.

    The store must live as long as the ranks.
    """
    common = {
        "WORLD_SIZE": str(nprocs * nnodes),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "GROUP_RANK": str(node_rank),
    }
    common |= {
        "MASTER_ADDR": master_addr or "127.0.0.1",
        "MASTER_PORT": str(master_port or DEFAULT_PORT),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        common["OMP_NUM_THREADS"] = str(cores.threads_per_rank(nprocs))
    if nnodes > 1 or master_port is not None:
        return common, None
    # On one machine this process holds the store, at a port that the system picks: nobody else can
    # take the port.
    from lockstep.process_group.rendezvous import host_store

    store = host_store("127.0.0.1", 0, datetime.timedelta(minutes=5))
    return common | {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}, store


def _start_method(fn: Callable[..., Any]) -> str:
    """Return how processes start.

    A function that no new process can import needs `fork`; others get `spawn`.
    """
    main = sys.modules["__main__"]
    in_a_file = Path(getattr(main, "__file__", None) or "").is_file()  # "<stdin>" is not a file
    # a lambda, or a function defined inside another
    nested = "<" in getattr(fn, "__qualname__", "")
    if (fn.__module__ != "__main__" or in_a_file) and not nested:
        return "spawn"
    used = (
        import_module("lockstep.machine.accelerator").in_use() if "torch" in sys.modules else None
    )
    if used is not None:
        why = (
            "a function that lives in a notebook or inside another function can't be imported by a"
            " fresh process"
        )
        fix = (
            "call spawn before anything touches a GPU, or move the function to the top of a module"
        )
        what = f"this process uses {used} already"
        where = f"spawn({getattr(fn, '__qualname__', fn)})"
        raise UsageError(f"{what}, so ranks can't be forks of it", where=where, why=why, fix=fix)
    return "fork"


def _check_not_importing_main() -> None:
    """Exit if a rank is importing the script.

    A call of `spawn` at the top level would start ranks again and again.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    where = getattr(sys.modules.get("__main__"), "__file__", None)
    fix = "put the call below `if __name__ == '__main__':`"
    error = UsageError(
        "the script calls lockstep.spawn while a rank is importing it", where=where, fix=fix
    )
    from_exception(error, rank_facts(), None).write(Path(os.environ[FAILURES]))
    os._exit(EXIT_USAGE)


def run_rank(
    fn: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], method: str
) -> None:
    """Prepare a rank's process, and run the function in it as a worker."""
    if method == _FORKSERVER:
        os.environ.clear()
    os.environ.update(environment)
    if method == _FORKSERVER:
        caller = multiprocessing.parent_process()
        assert caller is not None

        def end_with_caller() -> None:  # its parent, the server, lives on with it
            caller.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=end_with_caller, daemon=True).start()
    else:
        die_with_parent()
    if method in ("fork", _FORKSERVER):
        import torch

        # OpenMP's threads do not survive a fork, and waiting for them never ends; the server has
        # started none.
        asked = environment.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(
            int(asked) if method == _FORKSERVER and asked.isdigit() and int(asked) else 1
        )
    facts = rank_facts()
    cores.bind(facts.local_rank, facts.local_world_size)
    try:
        fn(*args)
        own_heartbeat().left()  # a fork ends without what `atexit` has registered
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return
        failure = from_exception(error, facts, None)
        failure.write(Path(environment[FAILURES]))
        flush_both()
        os._exit(failure.exit_code)  # skip the shutdown, which may wait for peers that are gone


def _wait(processes: Sequence[BaseProcess | ForkedRank], plot: "LivePlot | None") -> None:
    """Wait until all processes have ended well, or one has not; draw the plot meanwhile."""
    while True:
        # read once per round: they change meanwhile
        codes = [process.exitcode for process in processes]
        if plot is not None:
            plot.update()
        if any(codes) or None not in codes:
            return
        running = [
            process.sentinel for process, code in zip(processes, codes, strict=True) if code is None
        ]
        multiprocessing.connection.wait(running, None if plot is None else _DRAWING_SECONDS)


def _cause(
    processes: Sequence[BaseProcess | ForkedRank], ranks: Sequence[int], world: int, folder: Path
) -> Failure | None:
    """Return the failure to report, if any.

    Wait a little for the cause if only lost connections are known.
    """
    deadline = time.monotonic() + _CAUSE_SECONDS
    while True:
        failures = {failure.rank: failure for failure in read_all(folder)}
        for rank, process in zip(ranks, processes, strict=False):
            if process.exitcode and rank not in failures:
                failures[rank] = from_exit_code(rank, world, process.exitcode, time.time(), None)
        cause = first_cause(failures.values())
        if cause is None or not cause.consequence or time.monotonic() > deadline:
            return cause
        time.sleep(0.05)


class LivePlot:
    """A figure below a notebook's cell, drawn again each second.

    Without IPython one line says what to use instead.
    """

    def __init__(self, run: str | Path) -> None:
        self._run = local_path(run, "plot")
        self._begun = time.time()
        self._handle: Any = None
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is None or not hasattr(shell, "kernel"):
            instead = f"lockstep report {quote(str(run))} --live"
            print(
                f"lockstep: this is not a notebook, so plot={str(run)!r} shows nothing: {instead}"
            )
            return
        shown = import_module("IPython.display")
        self._html: Any = shown.HTML
        self._handle = shown.display(shown.HTML(self._drawn()), display_id=True)

    def update(self) -> None:
        if self._handle is not None:
            self._handle.update(self._html(self._drawn()))

    def _drawn(self) -> str:
        with suppress(UsageError):  # rank 0 has not made it yet
            run = read_run(self._run)
            # else it is of an earlier run in this folder
            if run.start.get("time", 0.0) >= self._begun:
                return sketch(run)
        return f"<p>{self._run.name}: starting</p>"


if __name__ == "__main__":
    run_rank(*handed_over())
