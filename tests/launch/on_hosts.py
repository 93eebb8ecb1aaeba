"""Launchers on hosts of their own (`tests.hosts`)."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.forked import Forked
from tests.hosts import Host
from tests.launch.shared import Ended, environment, finish

PORT = "29500"


def start_on(host: Host, folder: Path, *command: str, **more: str) -> subprocess.Popen[str]:
    """`python -m lockstep COMMAND` on a host, which has a name of its own that nobody
    can resolve.
    """
    return Forked(
        [sys.executable, "-m", "lockstep", *command],
        host=host,
        host_name=f"host{host.name.rpartition('-')[2]}",
        cwd=folder,
        env=environment(OMP_NUM_THREADS="1", **more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def launch_on(
    folder: Path,
    starts: Sequence[tuple[Host, int | None, str]],
    *options: str,
    nodes: int,
    pause: float = 0.0,
) -> list[Ended]:
    """`lockstep launch script.py` on each: (host, --node-rank or None for c10d, where it is told to
    meet).
    """
    processes = []
    for host, number, meeting in starts:
        address, _, port = meeting.rpartition(":")
        where = (
            ["--rdzv-endpoint", meeting]
            if number is None
            else ["--master-addr", address, "--master-port", port]
        )
        where += [] if number is None else ["--node-rank", str(number)]
        processes.append(
            start_on(
                host,
                folder,
                "launch",
                "--nnodes",
                str(nodes),
                "--nproc-per-node",
                "1",
                *where,
                *options,
                "script.py",
            )
        )
        time.sleep(pause)
    return [finish(process, folder, timeout=200) for process in processes]
