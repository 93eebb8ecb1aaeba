"""Several hosts, as network namespaces with names of their own: how they meet, and how it ends when they do not."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.diagnose import measure
from lockstep.diagnose.verdicts import BAD, GOOD
from tests.hosts import INTERFACE, Host, _run, hosts, require_root
from tests.launch.shared import Ended, environment, finish, script

pytestmark = pytest.mark.root
_PORT = "29500"
_SMALL = """
model: {name: transformer, args: {n_layer: 2, n_embd: 16, n_head: 2, vocab_size: 17, block_size: 8, dropout: 0.1}}
data: {name: "mydata:Tokens"}
training: {max_steps: 4, batch_size: 2, global_batch_size: 16, eval_steps: null}
distributed: {device: cpu, reproducible: true}
checkpoint: {save_steps: 4}
monitor: {sinks: [jsonl]}
"""
_DATA = """
import torch
from torch.utils.data import Dataset

class Tokens(Dataset):
    deterministic = True
    def __len__(self): return 64
    def __getitem__(self, index):
        ids = torch.arange(index, index + 9) % 17
        return {"input_ids": ids[:-1], "targets": ids[1:]}
"""


@pytest.fixture(scope="module")
def four() -> Iterator[list[Host]]:
    require_root()
    with hosts(4) as made:
        yield made


def start_on(host: Host, folder: Path, *command: str) -> subprocess.Popen[str]:
    """`python -m lockstep COMMAND` on a host, which has a name of its own that nobody can resolve."""
    name = host.name.rpartition("-")[2]
    named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', f"host{name}"]
    return subprocess.Popen(
        [*host.command, *named, sys.executable, "-m", "lockstep", *command],
        cwd=folder, env=environment(OMP_NUM_THREADS="1"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def launch_on(
    folder: Path, starts: Sequence[tuple[Host, int | None, str]], *options: str, nodes: int, pause: float = 0.0
) -> list[Ended]:
    """`lockstep launch script.py` on each: (host, --node-rank or None for c10d, where it is told to meet)."""
    processes = []
    for host, number, meeting in starts:
        address, _, port = meeting.rpartition(":")
        where = ["--rdzv-endpoint", meeting] if number is None else ["--master-addr", address, "--master-port", port]
        where += [] if number is None else ["--node-rank", str(number)]
        processes.append(
            start_on(
                host, folder, "launch", "--nnodes", str(nodes), "--nproc-per-node", "1", *where, *options, "script.py"
            )
        )
        time.sleep(pause)
    return [finish(process, folder, timeout=200) for process in processes]


@pytest.mark.parametrize("numbered", [True, False], ids=["numbered", "c10d"])
def test_hosts_start_in_any_order(four: list[Host], tmp_path: Path, numbered: bool) -> None:
    """The one where they meet comes last; those before it wait, and say so."""
    script(tmp_path, "import socket\nsay(host=socket.gethostname(), world=os.environ['WORLD_SIZE'])\n")
    meeting = f"{four[0].address}:{_PORT}"
    order = [2, 1, 0]
    starts = [(four[i], i if numbered else None, meeting) for i in order]
    ended = launch_on(tmp_path, starts, "--rdzv-conf", "timeout=90", nodes=3, pause=0.7)
    assert [e.code for e in ended] == [0, 0, 0], [e.err for e in ended]
    said = [ended[0].said(rank) for rank in range(3)]
    assert {one["world"] for one in said} == {"3"}
    names = [str(one["host"]) for one in said]
    assert sorted(names) == ["host0", "host1", "host2"]
    assert not numbered or names == ["host0", "host1", "host2"]
    assert all(f"waiting for 3 machines at {meeting}" in e.err for e in ended)


@pytest.mark.fault(
    "network: one of several machines does not come",
    "two of three are started",
    "those that are there name the one that is missing, and end with exit code 1 when the time is up",
)
def test_the_missing_host_is_named(four: list[Host], tmp_path: Path) -> None:
    script(tmp_path, "")
    meeting = f"{four[0].address}:{_PORT}"
    starts = [(four[0], 0, meeting), (four[2], 2, meeting)]
    for one in launch_on(tmp_path, starts, "--rdzv-conf", "timeout=20", nodes=3):
        assert one.code == 1
        assert "lockstep: machine 1 of 3 did not come to " in one.err, one.err
        assert "Traceback" not in one.err


@pytest.mark.fault(
    "network: a machine looks at the wrong port",
    "--master-port differs on one machine",
    "it says what did not answer; the first machine says which did not come; both exit with 1",
)
def test_a_wrong_port_is_told_on_both_sides(four: list[Host], tmp_path: Path) -> None:
    script(tmp_path, "")
    address = four[0].address
    starts = [(four[0], 0, f"{address}:{_PORT}"), (four[1], 1, f"{address}:29501")]
    first, second = launch_on(tmp_path, starts, "--rdzv-conf", "timeout=15", nodes=2)
    assert (first.code, second.code) == (1, 1)
    assert f"lockstep: machine 1 of 2 did not come to {address}:{_PORT} within 15 s" in first.err, first.err
    assert f"lockstep: the machines did not meet at {address}:29501" in second.err, second.err


@pytest.mark.fault(
    "configuration: two machines claim one number",
    "--node-rank 1 on two machines",
    "all launchers end at once with exit code 2, naming both machines",
)
def test_two_hosts_with_one_number(four: list[Host], tmp_path: Path) -> None:
    script(tmp_path, "")
    meeting = f"{four[0].address}:{_PORT}"
    starts = [(four[0], 0, meeting), (four[1], 1, meeting), (four[2], 1, meeting)]
    began = time.monotonic()
    for one in launch_on(tmp_path, starts, nodes=3):
        assert one.code == 2, one.err
        assert "two machines claim --node-rank 1: host" in one.err
        assert "host1" in one.err
        assert "host2" in one.err
    assert time.monotonic() - began < 120, "not after the rendezvous's 15 minutes"


@pytest.mark.fault(
    "network: the name of the first machine does not resolve",
    "--rdzv-endpoint no-such-host:29500",
    "it is asked for again for 30 s, as names may come late; then exit code 2, naming it and the machine",
)
def test_a_name_that_does_not_resolve(four: list[Host], tmp_path: Path) -> None:
    script(tmp_path, "")
    starts = [(four[1], None, "no-such-host.invalid:29500")]
    (ended,) = launch_on(tmp_path, starts, "--rdzv-conf", "timeout=1", nodes=2)
    assert ended.code == 2
    assert "lockstep: no-such-host.invalid does not resolve on this machine (host1)" in ended.err, ended.err
    assert "waiting for the name no-such-host.invalid to resolve" in ended.err


def test_hosts_with_ipv6_alone(tmp_path: Path) -> None:
    """No IPv4 address anywhere; ranks meet, and gloo reduces over the link."""
    require_root()
    script(
        tmp_path,
        """
import torch, lockstep
lockstep.setup()
say(sum=lockstep.all_reduce(RANK + 1, "sum"), address=os.environ["MASTER_ADDR"])
lockstep.cleanup()
""",
    )
    with hosts(2) as (a, b):
        for number, host in enumerate((a, b), start=1):
            _run("ip", "-n", host.name, "addr", "flush", "dev", INTERFACE)
            _run("ip", "-n", host.name, "addr", "add", f"fd99::{number}/64", "dev", INTERFACE, "nodad")
        for numbered in (True, False):
            starts = [(host, i if numbered else None, f"[fd99::1]:{_PORT}") for i, host in enumerate((a, b))]
            ended = launch_on(tmp_path, starts, "--rdzv-conf", "timeout=60", nodes=2)
            assert [e.code for e in ended] == [0, 0], [e.err for e in ended]
            assert [ended[0].said(rank)["sum"] for rank in (0, 1)] == [3, 3]
            assert str(ended[0].said(0)["address"]).startswith("fd99::")


def test_the_doctor_on_two_hosts(four: list[Host], tmp_path: Path) -> None:
    """Ports both ways, clocks, and that the machines do not share the run directory."""
    processes = []
    for number in (0, 1):
        own = tmp_path / str(number)
        own.mkdir()
        processes.append(
            start_on(four[number], own, "doctor", "--json", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank",
                     str(number), "--master-addr", four[0].address)
        )  # fmt: skip
    first, second = (finish(process, tmp_path) for process in processes)
    assert (first.code, second.code) == (0, 0), (first.err, second.err)
    lines = {line["name"]: line for line in json.loads(first.out)["lines"]}
    assert lines["ports"]["found"] == "2 machines reach one another on ephemeral ports (2 ways)"
    assert lines["clocks"]["found"].startswith("within ")
    assert lines["shared folder"]["status"] == "warning"
    assert f"on {INTERFACE}" in lines["meeting point"]["found"]
    assert "right on 2 ranks" in lines["all-reduce"]["found"]
    assert second.out == ""


def test_two_hosts_of_two_ranks_end_in_the_digest_of_four_ranks_and_of_one(four: list[Host], tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(_SMALL)
    (tmp_path / "mydata.py").write_text(_DATA)
    common = ("train", "small.yaml", "--output-dir")
    hybrid = ("distributed.strategy=fsdp", "distributed.fsdp.sharding_strategy=hybrid_shard")
    meeting = ("--rdzv-endpoint", f"{four[0].address}:{_PORT}", "--nnodes", "2", "--nproc-per-node", "2")
    two = [start_on(host, tmp_path, *common, "runs/two", *hybrid, *meeting) for host in four[:2]]
    ended = [finish(process, tmp_path, timeout=200) for process in two]
    ended.append(finish(start_on(four[0], tmp_path, *common, "runs/four", "--strategy", "ddp", "--nproc-per-node", "4"),
                        tmp_path, timeout=200))  # fmt: skip
    ended.append(finish(start_on(four[0], tmp_path, *common, "runs/one", "--strategy", "single"), tmp_path))
    assert [e.code for e in ended] == [0, 0, 0, 0], [e.err for e in ended]
    from lockstep.checkpoint import digest

    digests = {name: digest(tmp_path / f"runs/{name}/checkpoints/step-00000004") for name in ("two", "four", "one")}
    assert len(set(digests.values())) == 1, digests


# ---- ports, without hosts ----


def test_trap_36_an_ephemeral_port_that_is_closed_one_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meeting port is open, and the others are not: NCCL and gloo would wait for the whole timeout."""
    facts = [{"rank": rank, "host": f"host{rank}", "machine": f"m{rank}", "local_rank": 0} for rank in (0, 1)]
    found: dict[int, list[Any]] = {}
    store = dist.HashStore()
    closed = threading.local()
    real = socket.create_connection

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        if closed.to_others:
            raise TimeoutError("a firewall drops it")
        return real(place, timeout)

    monkeypatch.setattr(measure.socket, "create_connection", connect)

    def rank(number: int, *, behind_firewall: bool) -> None:
        closed.to_others = behind_firewall
        found[number] = measure.ports(measure.Exchange(store, number, 2), "127.0.0.1", facts)

    for firewall in (False, True):
        threads = [
            threading.Thread(target=rank, args=(i,), kwargs={"behind_firewall": firewall and i == 1}) for i in (0, 1)
        ]
        store = dist.HashStore()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert found[0] == found[1]
        (line,) = found[0]
        assert line.status == (BAD if firewall else GOOD)
        assert not firewall or "host1 127.0.0.1 does not reach host0 127.0.0.1 on an ephemeral port" in line.found
