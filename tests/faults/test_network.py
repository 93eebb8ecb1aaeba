"""Two hosts, as network namespaces with a link between them that can be cut."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep import checkpoint
from lockstep.run_directory.records import RunDirectory
from tests.faults.tiny import YAML, events, hold, steps
from tests.forked import Forked
from tests.hosts import Host
from tests.launch.shared import alive, environment, finish, lockstep, wait_for
from tests.launch.test_machines import two_namespaces  # noqa: F401

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


@pytest.fixture
def hosts(tmp_path: Path, two_namespaces: tuple[str, str]) -> Iterator["Hosts"]:  # noqa: F811
    hosts = Hosts(tmp_path, two_namespaces)
    yield hosts
    for process in hosts.processes:
        process.kill()


class Hosts:
    """A run with one rank on each of two hosts."""

    def __init__(self, folder: Path, names: tuple[str, str]) -> None:
        self.folder = folder
        self.names = names
        self.processes: list[subprocess.Popen[str]] = []
        (folder / "tiny.yaml").write_text(YAML)

    def start_on(self, number: int, nodes: str, *options: str) -> subprocess.Popen[str]:
        """Start the launcher of one host."""
        command = [
            "train",
            "tiny.yaml",
            "--nproc-per-node",
            "1",
            "--nnodes",
            nodes,
            "--output-dir",
            "run",
            *options,
            "--rdzv-endpoint",
            "10.77.0.1:29500",
        ]
        process = Forked(
            [sys.executable, "-m", "lockstep", *command],
            host=Host(self.names[number], ""),
            cwd=self.folder,
            env=environment(OMP_NUM_THREADS="1"),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    def start(self, *options: str) -> None:
        """Start both, and wait for a save; they are held soon after it."""
        hold(self.folder, 8)
        for number in (0, 1):
            self.start_on(number, "2", *options)
        wait_for(
            lambda: (
                events(self.folder / "run", "save")
                or any(p.poll() is not None for p in self.processes)
            ),
            200,
        )
        assert all(p.poll() is None for p in self.processes), [
            p.communicate() for p in self.processes
        ]

    def link(self, state: str) -> None:
        subprocess.run(
            ["ip", "-n", self.names[0], "link", "set", f"lsa{os.getpid()}", state], check=True
        )


@pytest.mark.fault(
    "network: the link between two hosts is cut for a second",
    "packets are lost; TCP sends them again",
    "training waits and goes on: no restart, each step once",
)
def test_a_link_cut_for_a_second(hosts: Hosts) -> None:
    hosts.start()
    hosts.link("down")
    hold(hosts.folder, None)
    time.sleep(1)
    hosts.link("up")
    ended = [finish(process, hosts.folder) for process in hosts.processes]
    assert [e.code for e in ended] == [0, 0], ended
    assert steps(hosts.folder / "run") == list(range(1, 41))
    assert not events(hosts.folder / "run", "restart")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.fault(
    "process: a host of several is killed, `--nnodes MIN:MAX`",
    "a machine loses power; later it comes back, and the command is started there again",
    "the hosts that are left notice it (15 s without a sign of life), start again by themselves"
    " from the newest checkpoint after waiting 30 s for more hosts, and take it back when it"
    " returns; every loss is that of a run that was never disturbed. The host of the meeting point"
    " (`--rdzv-endpoint`) can't be spared",
)
def test_a_host_that_is_killed_is_done_without_and_taken_back(hosts: Hosts) -> None:
    run = hosts.folder / "run"
    options = (
        "--max-restarts",
        "3",
        "--rdzv-conf",
        # A host joins between two signs of life of the others: each writes all that the store has
        # of them. With one a second, it never did on a slow machine.
        "last_call_timeout=5,keep_alive_interval=5,keep_alive_max_attempt=8",
        "training.max_steps=400",
        "distributed.reproducible=true",
    )

    def wait_until(happened: Callable[[], bool]) -> None:
        """Wait, and let the run take a step now and then, of which it has enough for all waits."""
        begun = max(steps(run), default=0)

        def there() -> bool:
            assert hosts.processes[0].poll() is None, hosts.processes[0].communicate()
            hold(hosts.folder, min(max(steps(run), default=0) + 1, begun + 50))
            return happened()

        wait_for(there, 600)

    def started_with(ranks: int, times: int) -> None:
        wait_until(
            lambda: [event["world_size"] for event in events(run, "start")].count(ranks) >= times
        )

    def save_again() -> None:
        before = len(events(run, "save"))
        wait_until(lambda: len(events(run, "save")) > before)

    hold(hosts.folder, 1)
    first, second = (hosts.start_on(number, "1:2", *options) for number in (0, 1))
    started_with(2, 1)
    save_again()
    second.kill()
    started_with(1, 1)
    save_again()
    returned = hosts.start_on(1, "1:2", *options)
    started_with(2, 2)
    save_again()
    hold(hosts.folder, None)
    (hosts.folder / "hurry").touch()
    ended = [finish(process, hosts.folder, timeout=600) for process in (first, returned)]
    assert [e.code for e in ended] == [0, 0], ended
    alone = lockstep(
        hosts.folder,
        "train",
        "tiny.yaml",
        "--output-dir",
        "alone",
        *options[4:],
        OMP_NUM_THREADS="1",
    )
    assert alone.code == 0, alone.err
    losses = [
        {row["step"]: row["loss"] for row in RunDirectory(hosts.folder / name).read_metrics()}
        for name in ("run", "alone")
    ]
    assert losses[0] == losses[1]
    assert steps(run) == list(range(1, 401)), "each step once"


@pytest.mark.full
@pytest.mark.fault(
    "network: the link between two hosts is cut for ever",
    "no packet arrives any more, and no connection is reset",
    "the ranks give up after `distributed.timeout_seconds`, or are found to hang; every launcher"
    " ends with exit code 1 and one message, at most two minutes later; what was committed is"
    " whole",
)
def test_a_link_cut_for_ever(hosts: Hosts) -> None:
    hosts.start("distributed.timeout_seconds=10")
    ranks = [rank["process"] for rank in events(hosts.folder / "run", "start")[-1]["ranks"]]
    hosts.link("down")
    hold(hosts.folder, None)
    ended = [finish(process, hosts.folder, timeout=240) for process in hosts.processes]
    assert [e.code for e in ended] == [1, 1], ended
    assert all("Traceback" not in e.err for e in ended), ended
    assert all(
        len([line for line in e.err.splitlines() if line.startswith("lockstep: ")]) == 3
        for e in ended
    ), ended
    assert not any(alive(process) for process in ranks)
    found = checkpoint.list_checkpoints(hosts.folder / "run/checkpoints")
    assert found
    assert [checkpoint.verify(path) for path in found] == [[]] * len(found)
