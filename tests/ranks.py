"""Run a function on several gloo ranks and bring its values and errors back.

Ranks are forks of one server process that has imported torch and Lockstep already: importing them takes four seconds of
a core, more than most tests that use ranks. Those on other hosts (`on=`) go there first.
"""

import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.hosts import Host

REPOSITORY = Path(__file__).parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any,
    timeout: float = 300, on: Sequence[Host] = (), fresh: bool = False,
) -> list[Any]:  # fmt: skip
    """`function(*args)` on each of `world_size` ranks, inside a gloo process group.

    The function is imported by name in other processes, so it must live at the top of a module.

    Args:
        on: hosts (`tests.hosts`) that share out the ranks, runs of neighbours; unset: this one.
        fresh: ranks are fresh processes, for variables that count when a process starts (MALLOC_…).

    Returns:
        what each rank returned, by rank (must pickle).

    Raises:
        AssertionError: with the traceback of the first rank that failed.
    """
    per_host = world_size // len(on) if on else world_size
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job")
        job.write_bytes(pickle.dumps((function.__module__, function.__name__, args)))
        environments = [
            {
                "MASTER_ADDR": on[0].address if on else "127.0.0.1",
                "MASTER_PORT": str(port),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(per_host),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % per_host),
            }
            for port in [free_port()]
            for rank in range(world_size)
        ]
        if fresh:
            assert not on
            _run_fresh(job, environments, timeout)
        else:
            _run_forks(job, environments, timeout, on)
        answers = [Path(f"{job}-{rank}") for rank in range(world_size)]
        results = [
            pickle.loads(a.read_bytes()) if a.exists() else ("error", f"{r} died") for r, a in enumerate(answers)
        ]
        errors = [text for kind, text in results if kind == "error"]
        assert not errors, "\n".join(errors)
        return [value for _, value in results]


def _run_forks(job: Path, environments: Sequence[dict[str, str]], timeout: float, on: Sequence[Host]) -> None:
    per_host = len(environments) // len(on) if on else len(environments)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    processes = [
        context.Process(
            target=_fork_main,
            args=(str(job), {**os.environ, **environment, **(host.environment if host else {})}, host),
        )
        for rank, environment in enumerate(environments)
        for host in [on[rank // per_host] if on else None]
    ]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                raise TimeoutError(f"a rank still runs after {timeout} s")
    finally:
        for process in processes:
            if process.pid is not None:  # it has been started
                process.kill()
                process.join()


def _run_fresh(job: Path, environments: Sequence[dict[str, str]], timeout: float) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", str(job)], env={**os.environ, **environment}, cwd=REPOSITORY
        )
        for environment in environments
    ]
    try:
        for process in processes:
            process.wait(timeout)
    finally:
        for process in processes:
            process.kill()


def _fork_main(job: str, environment: dict[str, str], host: Host | None) -> None:
    os.environ.clear()  # the server's are those of its start
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    if host is not None:
        host.enter()
    _rank_main(job)


def _rank_main(job: str) -> None:
    """What a rank does: the job in the file `job`; the answer goes beside it."""
    import datetime
    import gc
    import importlib
    import traceback

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    result: tuple[str, Any]
    try:
        module, name, args = pickle.loads(Path(job).read_bytes())
        gc.disable()  # imports make objects that stay: collections look at them again and again
        function = getattr(importlib.import_module(module), name)
        gc.freeze()
        gc.enable()
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
        result = ("value", function(*args))
    except BaseException:
        result = ("error", f"rank {rank}: {traceback.format_exc()}")
    Path(f"{job}-{rank}").write_bytes(pickle.dumps(result))
    if dist.is_initialized() and result[0] == "value":
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if result[0] == "value" else 1)


if __name__ == "__main__":
    _rank_main(sys.argv[1])
