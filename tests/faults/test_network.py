"""Two hosts, as network namespaces with a link between them that can be cut."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.tiny import YAML, events, steps
from tests.launch.shared import environment, finish, wait_for
from tests.launch.test_machines import two_namespaces  # noqa: F401

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]


@pytest.fixture
def hosts(tmp_path: Path, two_namespaces: tuple[str, str]) -> Iterator["Hosts"]:  # noqa: F811
    hosts = Hosts(tmp_path, two_namespaces)
    yield hosts
    for process in hosts.processes:
        process.kill()


class Hosts:
    """A run with one rank on each of two hosts."""

    def __init__(self, folder: Path, names: tuple[str, str]) -> None:
        self.folder, self.names = folder, names
        self.processes: list[subprocess.Popen[str]] = []
        (folder / "tiny.yaml").write_text(YAML)

    def start(self, *options: str) -> None:
        for name in self.names:
            self.processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", name, sys.executable, "-m", "lockstep", "train", "tiny.yaml",
                     "--nproc-per-node", "1", "--nnodes", "2", "--rdzv-endpoint", "10.77.0.1:29500",
                     "--output-dir", "run", *options],
                    cwd=self.folder, env=environment(OMP_NUM_THREADS="1"),
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )
            )  # fmt: skip
        wait_for(lambda: events(self.folder / "run", "save") or any(p.poll() is not None for p in self.processes), 200)
        assert all(p.poll() is None for p in self.processes), [p.communicate() for p in self.processes]

    def link(self, state: str) -> None:
        subprocess.run(["ip", "-n", self.names[0], "link", "set", f"lsa{os.getpid()}", state], check=True)


@pytest.mark.fault(
    "network: the link between two hosts is cut for a second",
    "packets are lost; TCP sends them again",
    "training waits and goes on: no restart, each step once",
)
def test_a_link_cut_for_a_second(hosts: Hosts) -> None:
    hosts.start()
    hosts.link("down")
    time.sleep(1)
    hosts.link("up")
    ended = [finish(process, hosts.folder) for process in hosts.processes]
    assert [e.code for e in ended] == [0, 0], ended
    assert steps(hosts.folder / "run") == list(range(1, 41))
    assert not events(hosts.folder / "run", "restart")
