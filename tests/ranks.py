"""Run a function on several gloo ranks and bring its values and errors back."""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.hosts import Host

REPOSITORY = Path(__file__).parent.parent

_MAIN = """
import gc
gc.disable()  # imports make objects that stay: collections look at them again and again
import pickle, sys, traceback
job, answer = sys.argv[1:3]
with open(job, "rb") as file:
    module, name, args = pickle.load(file)
import importlib, datetime, os
import torch, torch.distributed as dist
torch.set_num_threads(1)
try:
    function = getattr(importlib.import_module(module), name)
    gc.freeze()
    gc.enable()
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    result = ("value", function(*args))
except BaseException as error:
    result = ("error", f"rank {os.environ['RANK']}: {traceback.format_exc()}")
with open(answer, "wb") as file:
    pickle.dump(result, file)
if dist.is_initialized() and result[0] == "value":
    dist.destroy_process_group()
os._exit(0 if result[0] == "value" else 1)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 300, on: Sequence[Host] = ()
) -> list[Any]:
    """`function(*args)` on each of `world_size` ranks, inside a gloo process group.

    The function is imported by name in fresh processes, so it must live at the top of a module.

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
        common = {
            **os.environ,
            "MASTER_ADDR": on[0].address if on else "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(per_host),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        }
        processes = [
            subprocess.Popen(
                [*(host.command if host else ()), sys.executable, "-c", _MAIN, str(job), f"{folder}/{rank}"],
                env={
                    **common,
                    **(host.environment if host else {}),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank % per_host),
                },
                cwd=REPOSITORY,
            )
            for rank in range(world_size)
            for host in [on[rank // per_host] if on else None]
        ]
        try:
            for process in processes:
                process.wait(timeout)
        finally:
            for process in processes:
                process.kill()
        answers = [Path(folder, str(rank)) for rank in range(world_size)]
        results = [pickle.loads(a.read_bytes()) if a.exists() else ("error", f"{a.name} died") for a in answers]
        errors = [text for kind, text in results if kind == "error"]
        assert not errors, "\n".join(errors)
        return [value for _, value in results]
