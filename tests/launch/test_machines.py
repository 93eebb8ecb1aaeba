"""Several machines, as several launchers on this one or in network namespaces."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launch.options import LaunchOptions, hosts_rendezvous
from tests.launch.conftest import Launch
from tests.launch.shared import Ended, environment, finish, script, start, wait_for
from tests.ranks import free_port


def two_machines(folder: Path, *options: str, numbered: bool) -> list[Ended]:
    return [finish(process, folder) for process in start_two(folder, *options, numbered=numbered)]


def start_two(folder: Path, *options: str, numbered: bool) -> list[subprocess.Popen[str]]:
    number = ("--node-rank", "{}") if numbered else ()
    command = ["launch", "--nproc-per-node", "2", "--nnodes", "2", *number, *options, "script.py"]
    return [start(folder, *(word.format(node) for word in command)) for node in (0, 1)]


def test_trap_30_a_rank_is_no_machine_number(tmp_path: Path) -> None:
    """RANK taken for the machine's number: two worlds with the same ranks. rank = node_rank · nproc
    + local rank.
    """
    script(
        tmp_path,
        "say(**{name: os.environ[name] for name in ('GROUP_RANK', 'LOCAL_RANK', 'WORLD_SIZE')})\n",
    )
    ended = two_machines(
        tmp_path, "--master-addr", "127.0.0.1", "--master-port", str(free_port()), numbered=True
    )
    assert [e.code for e in ended] == [0, 0], ended
    for rank in range(4):
        expected = {"GROUP_RANK": str(rank // 2), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4"}
        assert ended[0].said(rank) == expected
    assert "2 processes on this machine" in ended[1].out
    assert "waiting for 2 machines at 127.0.0.1:" in ended[0].err


@pytest.mark.fault(
    "process: a rank fails on another machine",
    "this launcher only sees a lost connection",
    "every launcher names the rank that failed first",
)
def test_the_first_cause_is_told_where_it_was_not_too(tmp_path: Path) -> None:
    """A rank fails on one machine; the other's launcher, which only sees a lost connection, names
    it too. Nor does its own launcher, which ends it when a neighbour fails, keep it from telling.
    """
    script(
        tmp_path,
        """
class DiskError(Exception):
    def __str__(self):
        open("gone", "w").close()
        time.sleep(1)  # several times: on a busy machine others fail while this one is told
        return "the disk is full"
if RANK == 3:
    raise DiskError
while not os.path.exists("gone"):
    time.sleep(0.01)
time.sleep(0.2)
raise RuntimeError("Connection reset by peer")
""",
    )
    ended = two_machines(tmp_path, "--rdzv-endpoint", f"localhost:{free_port()}", numbered=False)
    assert [e.code for e in ended] == [1, 1]
    for one in ended:
        assert "rank 3 of 4 failed: DiskError: the disk is full" in one.err, one.err
        assert one.err.count("failed:") == 1


@pytest.mark.fault(
    "process: a rank fails when those of another machine are done",
    "the launcher of the other machine waits for this one's ranks to end",
    "it hears that they failed, says so, and ends with exit code 1 at once",
)
def test_a_machine_whose_ranks_are_done_does_not_wait_for_one_whose_ranks_failed(
    tmp_path: Path,
) -> None:
    """The library lets it wait for 300 s: the test of two hosts hung where a rank died after its
    work was done.
    """
    script(tmp_path, "if RANK == 3:\n    time.sleep(2)\n    os._exit(3)\n")
    since = time.monotonic()
    ended = two_machines(
        tmp_path, "--master-addr", "127.0.0.1", "--master-port", str(free_port()), numbered=True
    )
    assert time.monotonic() - since < 250  # seconds, on a busy machine
    assert [e.code for e in ended] == [1, 1], ended
    assert "rank 3 of 4 failed: the program left with code 3" in ended[1].err, ended
    assert "the ranks of another machine failed" in ended[0].err, ended


@pytest.mark.fault(
    "process: a rank fails on the machine that hosts the store, when those of another machine are"
    " done",
    "that machine leaves before the other one has read how its ranks ended",
    "it waits until the other one has read it: both say that ranks failed, with exit code 1",
)
@pytest.mark.parametrize("code", [0, 3])
def test_the_end_of_the_machine_with_the_store_is_read_by_a_slow_one(
    tmp_path: Path, code: int
) -> None:
    """The other one's launcher is stopped until the first one's ranks have ended for a while."""
    script(
        tmp_path,
        f"""
if RANK > 1:
    open(f"ended-{{RANK}}", "w").close()
while RANK < 2 and not os.path.exists("go"):
    time.sleep(0.01)
if RANK == 0 and {code}:
    os._exit({code})
""",
    )
    where = ("--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    first, second = start_two(tmp_path, *where, numbered=True)
    wait_for(lambda: (tmp_path / "ended-2").exists() and (tmp_path / "ended-3").exists())
    time.sleep(2)  # the launcher has seen its ranks end, and asks how the others end
    os.kill(second.pid, signal.SIGSTOP)
    (tmp_path / "go").touch()
    time.sleep(3)
    os.kill(second.pid, signal.SIGCONT)
    ended = [finish(process, tmp_path) for process in (first, second)]
    assert [one.code for one in ended] == ([1, 1] if code else [0, 0]), ended
    said = "rank 0 of 4 failed: the program left with code 3", "the ranks of another machine failed"
    for one, text in zip(ended, said, strict=True):
        assert (text in one.err) == bool(code), ended


@pytest.mark.fault(
    "network: a machine does not come",
    "one launcher waits for the others",
    "it says for whom, and ends with exit code 1 when the time is up",
)
def test_trap_35_a_machine_that_waits_for_another_says_so_and_ends(
    tmp_path: Path, launch: Launch
) -> None:
    """A shell that starts node 0 and then node 1 never gets to node 1. Node 0 says so, and ends."""
    script(tmp_path, "")
    port = str(free_port())
    ended = launch(
        "--nnodes",
        "2",
        "--node-rank",
        "0",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
        "--rdzv-conf",
        "timeout=5",
        "script.py",
    )
    assert ended.code == 1
    assert (
        f"waiting for 2 machines at 127.0.0.1:{port}; start this command on each of them"
        in ended.err
    )
    assert f"lockstep: machine 1 of 2 did not come to 127.0.0.1:{port} within 5 s" in ended.err
    assert "Traceback" not in ended.err


@pytest.fixture
def two_namespaces() -> Iterator[tuple[str, str]]:
    """Two hosts 10.77.0.1 and 10.77.0.2 with a link between them."""
    mine = os.getpid()
    names = (f"lockstep-{mine}-a", f"lockstep-{mine}-b")
    links = (f"lsa{mine}", f"lsb{mine}")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip(
            "link",
            "add",
            links[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            links[1],
            "netns",
            names[1],
        )
        for number, (name, link) in enumerate(zip(names, links, strict=True), start=1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.mark.full
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_trap_37_a_namespace_knows_its_own_address(
    tmp_path: Path, two_namespaces: tuple[str, str]
) -> None:
    """The library compares the endpoint with what the host's name resolves to, and in a namespace
    finds no host.
    """
    script(
        tmp_path,
        """
import socket
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=100).close()
say(world=os.environ["WORLD_SIZE"], gloo=os.environ["GLOO_SOCKET_IFNAME"])
""",
    )
    processes = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                "-m",
                "lockstep",
                "launch",
                "--nproc-per-node",
                "1",
                "--nnodes",
                "2",
                "--rdzv-endpoint",
                "10.77.0.1:29500",
                "script.py",
            ],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in two_namespaces
    ]
    ended = [finish(process, tmp_path) for process in processes]
    assert [e.code for e in ended] == [0, 0], ended
    said = [ended[0].said(rank) for rank in (0, 1)]
    assert [one["world"] for one in said] == ["2", "2"]
    assert {one["gloo"] for one in said} == {f"lsa{os.getpid()}", f"lsb{os.getpid()}"}


def test_trap_37_the_user_has_the_last_word() -> None:
    """With numbered machines the first one hosts, whatever names resolve to."""
    endpoint = "203.0.113.7:29500"
    assert hosts_rendezvous(LaunchOptions(nnodes="2", rdzv_endpoint=endpoint, node_rank=0))
    assert not hosts_rendezvous(LaunchOptions(nnodes="2", rdzv_endpoint=endpoint, node_rank=1))
    assert not hosts_rendezvous(LaunchOptions(nnodes="2", rdzv_endpoint=endpoint))
