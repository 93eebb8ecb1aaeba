"""Run a function on several gloo ranks and bring its values and errors back.

Ranks are forks of a server that has imported torch and Lockstep (`tests.forked`).
"""

import fcntl
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.forked import Forked
from tests.hosts import REPOSITORY, Host

T = TypeVar("T")

_PORTS = 12_000


def results_or_errors(run: Callable[..., T], cases: Iterable[Sequence[Any]]) -> list[T | str]:
    """Run cases, whose members are the arguments, one after the other; an error is its case's
    result, in words.
    """
    results: list[T | str] = []
    for case in cases:
        try:
            results.append(run(*case))
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def free_port() -> int:
    """A port that nobody has, and that nobody else takes until it is used.

    Other processes let the kernel choose theirs, so this one is below those from which it chooses;
    and whoever asks here, in any process, takes the next in turn.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    first = max(1024, end - _PORTS)
    turn = Path(tempfile.gettempdir(), f"lockstep-test-ports-{os.getuid()}")
    with open(turn, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        number = int(file.read() or 0)
        while True:
            port = first + number % (end - first)
            number += 1
            with socket.socket() as probe, suppress(OSError):
                probe.bind(("", port))
                break
        file.truncate(0)
        file.write(str(number))
    return port


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 300,
    on: Sequence[Host] = (),
) -> list[Any]:
    """`function(*args)` on each of `world_size` ranks, inside a gloo process group.

    The function is imported by name in other processes, so it must live at the top of a module.

    Args:
        on: hosts (`tests.hosts`) that share out the ranks, runs of neighbours; unset: this one.

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
        _run(
            job,
            environments,
            timeout,
            [on[rank // per_host] if on else None for rank in range(world_size)],
        )
        answers = [Path(f"{job}-{rank}") for rank in range(world_size)]
        results = [
            pickle.loads(a.read_bytes()) if a.exists() else ("error", f"{r} died")
            for r, a in enumerate(answers)
        ]
        errors = [text for kind, text in results if kind == "error"]
        assert not errors, "\n".join(errors)
        return [value for _, value in results]


def _run(
    job: Path, environments: Sequence[dict[str, str]], timeout: float, hosts: Sequence[Host | None]
) -> None:
    processes: list[subprocess.Popen[str]] = []
    try:
        for environment, host in zip(environments, hosts, strict=True):
            of_host = {} if host is None else host.environment
            command = [sys.executable, "-m", "tests.ranks", str(job)]
            env = {
                **os.environ,
                **environment,
                **of_host,
            }
            processes.append(Forked(command, env=env, cwd=REPOSITORY, host=host))
        deadline = time.monotonic() + timeout
        for process in processes:
            process.wait(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.wait()


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
