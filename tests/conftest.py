"""What holds for all tests: none leaves a process, a listening port or a network namespace behind."""

import gc
import os
import shutil
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

_MARK = "LOCKSTEP_TEST_SESSION"  # in the environment of everything that the tests start
_PATIENCE_SECONDS = 10.0

if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # what the tests start inherits it: under nohup it would be ignored


def left_behind(mark: str, ports_before: set[int]) -> list[str]:
    """Processes, ports of this process, and namespaces that are still there."""
    found = [f"process {p.pid}: {' '.join(p.cmdline())[:200]}" for p in _marked(mark)]
    gc.collect()
    found += [f"port {port} listens in the tests' process" for port in sorted(listening() - ports_before)]
    names = (
        subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout if _has_ip() else ""
    )
    mine = (f"lk{os.getpid()}-", f"lockstep-{os.getpid()}-")
    return found + [f"namespace {line.split()[0]}" for line in names.splitlines() if line.startswith(mine)]


def listening() -> set[int]:
    """TCP ports on which this process listens."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def _marked(mark: str) -> list[psutil.Process]:
    found = {child.pid: child for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark:
                found[process.pid] = process
        except (psutil.AccessDenied, psutil.NoSuchProcess):
            continue
    return [process for process in found.values() if _runs(process)]


def _runs(process: psutil.Process) -> bool:
    """Neither a zombie nor one of the multiprocessing module's own servers, which end with this process.

    Ranks are forks of one of them, and have its command line: they are told by their parent.
    """
    try:
        command = " ".join(process.cmdline())
        is_fork_server = "multiprocessing.forkserver" in command and process.ppid() == os.getpid()
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in command and not is_fork_server
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return False


def _has_ip() -> bool:
    return shutil.which("ip") is not None


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Fails the session, at its end, with what some test has left."""
    before = os.environ.get(_MARK)
    mark = os.environ[_MARK] = uuid.uuid4().hex
    ports = listening()
    yield
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while (found := left_behind(mark, ports)) and time.monotonic() < deadline:
        time.sleep(0.1)
    if before is None:
        os.environ.pop(_MARK)
    assert not found, "tests left behind: " + "; ".join(found)
