"""What holds for all tests: none leaves a process, a listening port or a network
namespace behind.
"""

import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Generator, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import pytest

from tests import bucket, forked

_prefixes = itertools.count()
_MARK = "LOCKSTEP_TEST_SESSION"  # in the environment of everything that the tests start
_NO_PROCESSES = "LOCKSTEP_TESTS_START_NO_PROCESSES"  # in the environment under --no-processes
_PATIENCE_SECONDS = 10.0
_FIRST_SEEN: dict[int, str] = {}  # the test after which each port of this process was first there
# The tests are of CPUs: with a GPU, `device: auto` would take it, and two ranks have but one.
_ACCELERATORS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

# Files that run in one worker: what they share is made once.
_TOGETHER = (
    # the results of one launch of ranks (`tests.parallel.pipeline.pipeline_launch`)
    (
        "tests/parallel/pipeline/test_pipeline.py",
        "tests/parallel/pipeline/test_pipeline_hybrid.py",
        "tests/parity/test_pipeline.py",
    ),
    # the parsed files of the package (`tests.house`)
    (
        "tests/test_line_rules.py",
        "tests/test_errors.py",
        "tests/test_house.py",
        "tests/test_rooms.py",
        "tests/parallel/axes/test_axes.py",
        "tests/docs/test_glossary.py",
    ),
)
_FIRST_OF = {file: files[0] for files in _TOGETHER for file in files}
# Long files whose tests share nothing: each test goes to whichever worker is free.
_APART = (
    "tests/verify/test_script.py",
    "tests/launch/test_hosts.py",
    "tests/failures/test_hang.py",
    "tests/launch/test_machines.py",
    "tests/failures/test_only_some.py",
)
# The longest files begin first, so that no worker ends long after the others.
_LONGEST = (
    "tests/parallel/pipeline/test_pipeline.py",
    "tests/verify/test_script.py",
    "tests/verify/test_faults.py",
    "tests/launch/test_hosts.py",
    "tests/failures/test_hang.py",
    "tests/failures/test_only_some.py",
    "tests/trainer/test_resume.py",
    "tests/checkpoint/test_object_store.py",
    "tests/evaluate/test_evaluate.py",
    "tests/parallel/diloco/test_diloco.py",
    "tests/launch/test_hosts_compared.py",
    "tests/parity/test_compiled.py",
    "tests/parity/test_same_bits.py",
    "tests/parity/test_mixture.py",
    "tests/parity/test_tensor.py",
    "tests/prepared/test_process.py",
    "tests/test_line_rules.py",
    "tests/faults/test_processes.py",
    "tests/parity/test_known_mistakes.py",
    "tests/parity/test_context.py",
    "tests/parity/test_data_parallel.py",
    "tests/parity/test_change_of_topology.py",
    "tests/seams/test_strategy.py",
    "tests/parallel/test_traffic.py",
    "tests/parallel/fsdp/test_fsdp.py",
    "tests/monitor/test_ranks.py",
    "tests/simulated_device/test_simulated_device.py",
    "tests/trainer/test_metrics.py",
    "tests/checkpoint/test_ranks.py",
    "tests/prepared/test_warm.py",
    "tests/test_ready_configs.py",
    "tests/parallel/test_memory.py",
    "tests/cli/test_train.py",
    "tests/failures/test_stopped.py",
)

if threading.current_thread() is threading.main_thread():
    # what the tests start inherits it: under nohup it would be ignored
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def left_behind(mark: str, ports_before: set[int]) -> list[str]:
    """Processes, ports of this process, and namespaces that are still there."""
    found = [f"process {p.pid}: {' '.join(p.cmdline())[:200]}" for p in _marked(mark)]
    gc.unfreeze()  # what was garbage when imports were frozen would stay, with its ports
    gc.collect()
    gc.freeze()
    found += [
        f"port {port} listens in the tests' process, since {_FIRST_SEEN.get(port, 'this test')}"
        for port in sorted(listening() - ports_before)
    ]
    names = (
        subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
        if _has_ip() and _NO_PROCESSES not in os.environ
        else ""
    )
    mine = (f"lk{os.getpid()}-", f"lockstep-{os.getpid()}-")
    return found + [
        f"namespace {line.split()[0]}" for line in names.splitlines() if line.startswith(mine)
    ]


def listening() -> set[int]:
    """TCP ports on which this process listens."""
    connections = psutil.Process().net_connections(kind="tcp")
    return {
        connection.laddr.port
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Note which test was the last to run before a port was there."""
    try:
        return (yield)
    finally:
        seen = {port: _FIRST_SEEN.get(port, item.nodeid) for port in listening()}
        _FIRST_SEEN.clear()
        _FIRST_SEEN.update(seen)


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
    """Neither a zombie nor one of the servers that make forks and end with this process, as their
    forks do not.
    """
    try:
        command = " ".join(process.cmdline())
        is_fork_server = "multiprocessing.forkserver" in command and process.ppid() == os.getpid()
        is_server = is_fork_server or "resource_tracker" in command or forked.is_server(process.pid)
        return process.status() != psutil.STATUS_ZOMBIE and not is_server
    except (psutil.AccessDenied, psutil.NoSuchProcess):
        return False


def _has_ip() -> bool:
    return shutil.which("ip") is not None


def _work_of(node_id: str) -> str:
    """Return the file that stands for a test where workers are given whole files."""
    file = node_id.split("::", 1)[0]
    return _FIRST_OF.get(file, file)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without collections of garbage, and leave what was imported out of later ones.

    They would walk through a million objects again and again, and find nothing: half the time of a
    worker's start, and a tenth of that of tests that compute in it.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-processes",
        action="store_true",
        help="leave out the tests that start processes, as ranks",
    )


def _hides_accelerators(config: pytest.Config) -> bool:
    return str(config.option.markexpr) != "gpu"


def pytest_report_header(config: pytest.Config) -> str | None:
    if _hides_accelerators(config):
        return "accelerators: hidden from these tests; `make gpu` runs what needs one"
    return None


def pytest_configure(config: pytest.Config) -> None:
    if _hides_accelerators(config):  # before torch is imported, here and in what the tests start
        os.environ.update(dict.fromkeys(_ACCELERATORS, ""))
    if not config.getoption("no_processes"):
        return
    os.environ[_NO_PROCESSES] = "1"
    start = BaseProcess.start

    def watch(event: str, _args: object) -> None:
        if event in ("subprocess.Popen", "os.fork"):
            leave_out()

    def leave_out() -> None:
        if "PYTEST_CURRENT_TEST" in os.environ:  # else it is pytest itself which starts one
            pytest.skip("starts a process, which --no-processes leaves out")

    def start_or_leave_out(process: BaseProcess) -> None:
        leave_out()
        start(process)

    sys.addaudithook(watch)
    BaseProcess.start = start_or_leave_out  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first; the order within a file stays."""
    rank = {file: place for place, file in enumerate(_LONGEST)}
    items.sort(key=lambda item: rank.get(_work_of(item.nodeid), len(rank)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole files, those of `_TOGETHER` to one, and single tests of `_APART`."""
    from xdist.scheduler import LoadFileScheduling

    class WholeFiles(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            work = _work_of(nodeid)
            return nodeid if work in _APART else work

    return WholeFiles(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """Start the workers as forks of one process, with what they import: each spent 12 s of a core
    on it.

    Few quick tests are not worth the import of all that others use, and only Linux has what
    `forked` needs.
    """
    if config.getoption("no_processes") or sys.platform != "linux":
        return
    from execnet import gateway_io

    class ForkedWorker(gateway_io.Popen2IOMaster):
        def __init__(self, _command: Any, execmodel: Any) -> None:
            pipe = subprocess.PIPE
            self.popen: Any = forked.Forked(
                [sys.executable, "-m", forked.PYTEST_WORKER], stdin=pipe, stdout=pipe
            )
            gateway_io.Popen2IO.__init__(
                self, self.popen.stdin, self.popen.stdout, execmodel=execmodel
            )

    # execnet lets a command take the place of Python's, but not a process that runs already.
    gateway_io.Popen2IOMaster = ForkedWorker  # type: ignore[misc]


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails the session, at its end, with what some test has left.

    A process that this machine's user has left with `lockstep warm` is not used meanwhile.
    """
    os.environ["XDG_RUNTIME_DIR"] = str(tmp_path_factory.mktemp("runtime"))
    before = os.environ.get(_MARK)
    mark = os.environ[_MARK] = uuid.uuid4().hex
    ports = listening()
    yield
    deadline = time.monotonic() + _PATIENCE_SECONDS
    found = left_behind(mark, ports)
    while found and time.monotonic() < deadline:
        time.sleep(0.1)
        found = left_behind(mark, ports)
    if before is None:
        os.environ.pop(_MARK)
    assert not found, "tests left behind: " + "; ".join(found)


@pytest.fixture(scope="module")
def _running_bucket_proxy() -> Iterator[bucket.Proxy]:
    bucket.require_servers()
    with bucket.bucket_server() as port:
        proxy = bucket.Proxy(port)
        yield proxy
        proxy.close()


@pytest.fixture
def bucket_proxy(
    _running_bucket_proxy: bucket.Proxy, monkeypatch: pytest.MonkeyPatch
) -> bucket.Proxy:
    """A proxy before a real server, which this process and its children reach through it."""
    _running_bucket_proxy.reset()
    for name, value in bucket.environment(_running_bucket_proxy.url).items():
        monkeypatch.setenv(name, value)
    return _running_bucket_proxy


@pytest.fixture
def bucket_url() -> str:
    """A prefix of its own, which is empty."""
    return f"{bucket.SCHEME}://team/run-{next(_prefixes)}"
