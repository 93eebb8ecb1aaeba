"""Joining the other ranks: device, backend, rendezvous, helpers."""

import datetime
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.config import DistributedConfig
from lockstep.errors import LockstepError, RunError, UsageError
from lockstep.machine import accelerator
from lockstep.machine.environment import RankFacts, rank_facts
from lockstep.process_group import cluster, collectives, rendezvous
from tests.forked import Forked
from tests.ranks import REPOSITORY, free_port

_LAUNCHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that nobody launched, and that has set up nothing; what `setup` changes is put
    back.
    """
    for name in [
        name
        for name in os.environ
        if name in _LAUNCHERS or name.startswith(("SLURM_", "OMPI_", "NCCL_"))
    ]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    threads = torch.get_num_threads()
    yield
    cluster.cleanup()
    os.environ.clear()
    os.environ.update(before)
    torch.set_num_threads(threads)


# ---- two ranks ----


_CASES = """
import json, os, sys
import torch, torch.distributed as dist
import lockstep
from lockstep.process_group.collectives import create_group
from lockstep.config import DistributedConfig
from lockstep.layout import Layout
from lockstep.process_group.mesh import device_mesh

rank, folder, port, other = int(os.environ["OMPI_COMM_WORLD_RANK"]), sys.argv[1], sys.argv[2], sys.argv[3]
said = {}

def facts():
    return [lockstep.rank(), lockstep.world_size(), lockstep.local_rank(), lockstep.is_main_process()]

said["before"] = facts()
try:
    lockstep.all_reduce(1)
except lockstep.UsageError as error:
    said["too early"] = str(error)
here = lockstep.setup(DistributedConfig(timeout_seconds=77))           # an env:// that says no address
said["cluster"] = [here.backend, str(here.device), here.facts.launcher]
said["again"] = lockstep.setup() is here
said["after"] = facts()
said["threads"] = torch.get_num_threads()
along_shards = device_mesh(Layout(replicate=2), "cpu")["shard"].get_group()
groups = [dist.group.WORLD, create_group("columns", [[0], [1]]), along_shards]
said["timeout"] = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
said["numbers"] = {op: lockstep.all_reduce(rank + 1, op) for op in ("mean", "sum", "max", "min")}
said["kinds"] = [type(lockstep.all_reduce(1, op)).__name__ for op in ("mean", "sum")]
said["big"] = lockstep.all_reduce(2**53 + 1, "max") == 2**53 + 1
value = torch.arange(6, dtype=torch.float32).reshape(2, 3).t() * (rank + 1)
result = lockstep.all_reduce(value)
said["tensor"] = [result.tolist(), value[1, 0].item(), result.dtype == value.dtype]
lockstep.barrier()
lockstep.cleanup()
said["left"] = not dist.is_initialized()

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)            # an env:// that says one
lockstep.setup()
said["env"] = lockstep.all_reduce(rank, "sum")
lockstep.cleanup()

os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"                     # under torchrun, but with an address of its own
lockstep.setup(DistributedConfig(init_method=f"tcp://127.0.0.1:{other}"))
said["tcp"] = lockstep.all_reduce(rank, "sum")
lockstep.cleanup()
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump(said, file)
"""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks said that something like mpirun started: it gives numbers, and no address."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "cases.py").write_text(_CASES)
    names = [n for n in os.environ if n not in _LAUNCHERS and n != "OMP_NUM_THREADS"]
    base = {n: os.environ[n] for n in names} | {
        "PYTHONPATH": str(REPOSITORY),
        "OMPI_COMM_WORLD_SIZE": "2",
    }
    command = [sys.executable, "-m", "cases", str(folder), str(free_port()), str(free_port())]
    processes = [
        Forked(
            command,
            cwd=folder,
            env=base
            | {f"OMPI_COMM_WORLD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")}
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for process in processes:
        _, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_trap_31_env_without_an_address_just_works_on_one_machine(
    two_ranks: list[dict[str, Any]],
) -> None:
    """`env://` with no MASTER_ADDR fails in torch, though the ranks of one machine can find each
    other without.
    """
    for said in two_ranks:
        assert said["cluster"] == ["gloo", "cpu", "mpirun"]
        assert said["numbers"]["sum"] == 3


def test_an_address_from_the_environment_or_the_config_works(
    two_ranks: list[dict[str, Any]],
) -> None:
    for said in two_ranks:
        assert said["env"] == said["tcp"] == 1


def test_helpers_know_the_rank_before_and_after(two_ranks: list[dict[str, Any]]) -> None:
    for rank, said in enumerate(two_ranks):
        assert said["before"] == said["after"] == [rank, 2, rank, rank == 0]
        assert "call lockstep.setup() first" in said["too early"]
        assert said["again"]
        assert said["left"]


def test_all_reduce_of_numbers_and_tensors(two_ranks: list[dict[str, Any]]) -> None:
    for rank, said in enumerate(two_ranks):
        assert said["numbers"] == {"mean": 1.5, "sum": 3, "max": 2, "min": 1}
        assert said["kinds"] == ["float", "int"]
        assert said["big"], "whole numbers are not rounded to floats"
        result, own, same_dtype = said["tensor"]
        assert result == [[0.0, 4.5], [1.5, 6.0], [3.0, 7.5]]
        assert own == rank + 1, "the argument is left as it is"
        assert same_dtype


def test_trap_34_the_timeout_comes_from_the_config(two_ranks: list[dict[str, Any]]) -> None:
    """NCCL_TIMEOUT does nothing in torch: the world and its groups are made with the config's
    timeout.
    """
    assert [said["timeout"] for said in two_ranks] == [[77.0] * 3] * 2


def test_ranks_share_out_the_cores(two_ranks: list[dict[str, Any]]) -> None:
    assert two_ranks[0]["threads"] == max(1, len(os.sched_getaffinity(0)) // 2)


# ---- one process ----


def test_alone_no_group_is_needed() -> None:
    here = cluster.setup()
    assert here.backend == "none"
    assert not dist.is_initialized()
    assert (collectives.rank(), collectives.world_size(), collectives.is_main_process()) == (
        0,
        1,
        True,
    )
    assert collectives.all_reduce(3.0, "sum") == 3.0
    assert collectives.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    collectives.barrier()


def test_a_group_that_exists_is_used_and_left_alone() -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    try:
        assert cluster.setup().backend == "gloo"
        cluster.cleanup()
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_numbers_lie_where_the_process_group_can_send_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`backend: nccl` serves GPUs alone; `auto` has gloo beside it, for what lies on the hosts."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for backends, device in (
        ("cuda:nccl", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
    ):
        monkeypatch.setattr(dist, "get_backend_config", lambda backends=backends: backends)
        assert collectives.device_of_numbers() == torch.device(device)


def test_all_reduce_refuses_what_it_cannot_do() -> None:
    with pytest.raises(UsageError, match="mean, sum, max, min"):
        collectives.all_reduce(1.0, "product")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="int64"):
        collectives.all_reduce(torch.ones(2, dtype=torch.int64))


def test_trap_34_nccl_timeout_variables_are_said_to_do_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, by rank 0, naming the key that does something."""
    monkeypatch.setenv("NCCL_TIMEOUT_SECONDS", "3600")
    with caplog.at_level(logging.WARNING, "lockstep"):
        cluster._warn_of_nccl_timeout(RankFacts(rank=0, world_size=2))
        cluster._warn_of_nccl_timeout(RankFacts(rank=1, world_size=2))
    assert len(caplog.records) == 1
    assert "NCCL_TIMEOUT_SECONDS" in caplog.text
    assert "distributed.timeout_seconds" in caplog.text


def test_trap_21_the_device_is_the_local_rank_and_is_set_before_anything_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The global rank as device index, or a GPU touched before `set_device`: every rank holds
    memory on GPU 0.
    """
    order: list[tuple[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(accelerator, "_selected", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: order.append(("set_device", device))
    )
    monkeypatch.setattr(cluster, "rendezvous", lambda *_: order.append(("rendezvous", None)))
    monkeypatch.setattr(cluster, "choose_interface", lambda *_: None)
    monkeypatch.setattr(cluster, "_share_calls", lambda _: None)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **kw: order.append((backend, kw["device_id"]))
    )
    facts = {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
    }
    for name, value in facts.items():
        monkeypatch.setenv(name, value)
    here = cluster.setup()
    device = torch.device("cuda", 2)
    assert order == [("set_device", device), ("rendezvous", None), ("cpu:gloo,cuda:nccl", device)]
    assert here.device == device
    assert here.backend == "nccl"


def test_more_ranks_than_gpus_is_refused_with_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    facts = RankFacts(rank=2, local_rank=2, world_size=4, local_world_size=4)
    with pytest.raises(UsageError, match="4 ranks on this machine, 2 GPUs visible"):
        cluster._choose_device("auto", facts)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    each_sees_its_own = RankFacts(
        rank=2, local_rank=2, world_size=4, local_world_size=4, launcher="srun"
    )
    assert cluster._choose_device("auto", each_sees_its_own) == torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"backend": "mpi"}, "this torch was built without MPI"),
        ({"backend": "nccl"}, "nccl, but the device is cpu"),
        ({"backend": "xccl"}, "xccl, but the device is cpu"),
        ({"device": "cuda"}, "torch sees no GPU here"),
        ({"device": "xpu"}, "torch sees no GPU here"),
        ({"device": "mps"}, "torch sees no GPU here"),
        (
            {"device": "gpu"},
            "torch knows no accelerator of that name.*\n.*registers with torch\n.*device: cpu",
        ),
        ({"device": "vulkan"}, "torch knows no accelerator of that name"),
        ({"device": "ipu"}, "torch knows no accelerator of that name"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")
def test_what_this_torch_cannot_do_is_one_message(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cluster.setup(DistributedConfig(**config))


def launched(monkeypatch: pytest.MonkeyPatch, **facts: object) -> None:
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    for name, value in {**defaults, **facts}.items():
        monkeypatch.setenv(name, str(value))


def test_a_port_in_use_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        launched(monkeypatch, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        with pytest.raises(UsageError, match=f"port {port} is in use on this machine") as raised:
            cluster.setup()
    assert "MASTER_PORT" in str(raised.value)


@pytest.mark.fault(
    "network: a rank does not come",
    "the meeting times out",
    "one message with the address and what must be reachable",
)
@pytest.mark.parametrize("rank", [0, 1])
def test_trap_36_ranks_that_do_not_come_are_said_with_the_ports_that_must_be_open(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Opening the meeting port alone is not enough: the traffic between ranks takes any port."""
    launched(monkeypatch, RANK=rank, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
    with pytest.raises(
        RunError, match=f"rank {rank} did not meet the other ranks at 127.0.0.1:"
    ) as raised:
        cluster.setup(DistributedConfig(timeout_seconds=1))
    assert "on that port for meeting, on any port for the traffic between ranks" in str(
        raised.value
    )


def test_a_restarted_rank_does_not_read_what_the_attempt_before_it_wrote(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun's store outlives its ranks, and the addresses of dead ranks are in it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launched(
        monkeypatch,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=store.port,
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    seen = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        meeting = rendezvous.rendezvous(
            DistributedConfig(), rank_facts(), datetime.timedelta(seconds=5)
        )
        seen.append(meeting.check(["rank0"]))
        meeting.set("rank0", "an address")
    assert seen == [False, False]


def test_several_machines_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, WORLD_SIZE=4)
    with pytest.raises(UsageError, match="4 ranks on 2 machines need an address"):
        cluster.setup()


def test_debug_switches_and_variables_are_set_before_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = DistributedConfig(debug="detail", env={"NCCL_IB_DISABLE": 1, "NCCL_DEBUG": "TRACE"})  # type: ignore[dict-item]
    seen: dict[str, str] = {}
    launched(
        monkeypatch,
        WORLD_SIZE=1,
        LOCAL_WORLD_SIZE=1,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=free_port(),
    )
    monkeypatch.setattr(
        cluster, "_join", lambda *_: seen.update(os.environ, level=str(dist.get_debug_level()))
    )
    try:
        cluster.setup(config)
        assert seen["NCCL_IB_DISABLE"] == "1"
        assert seen["NCCL_DEBUG"] == "TRACE", "what the user writes is stronger than the switch"
        assert seen["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"
        assert "DETAIL" in seen["level"]
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_errors_of_setup_can_be_told_between_ranks() -> None:
    """They travel as pickles."""
    import pickle

    error = UsageError("what", where="where", fix="fix")
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, LockstepError)
    assert str(again) == str(error)


def test_the_meeting_file_is_this_jobs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs of one user on one machine must not meet; nor a restarted one with its own past."""
    facts = RankFacts(world_size=2, local_world_size=2)
    names = {rendezvous._job_name(facts)}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    names.add(rendezvous._job_name(facts))
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    names.add(rendezvous._job_name(facts))
    assert len(names) == 3
    assert Path(f"/proc/{os.getppid()}").exists()


def test_a_group_that_the_script_has_left_tells_nothing_any_more() -> None:
    """Its facts outlived it once: the process took itself for a rank of a launcher's, and ended as
    one.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert cluster.setup().facts.launcher != "none"
    dist.destroy_process_group()
    assert rank_facts() == RankFacts()
    assert cluster.setup().facts == RankFacts()


def test_a_device_of_one_process_is_refused_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    assert cluster._choose_device("mps", RankFacts()) == torch.device("mps", 0)
    with pytest.raises(UsageError, match=r"device is mps, and there are 2 ranks"):
        cluster._choose_device("mps", RankFacts(rank=0, world_size=2, local_world_size=2))


def test_auto_takes_the_accelerator_that_torch_finds_except_mps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind, taken in (("xpu", "xpu"), ("mps", "cpu")):
        monkeypatch.setattr(
            torch.accelerator,
            "current_accelerator",
            lambda check_available, k=kind: torch.device(k),
        )
        monkeypatch.setattr(torch.get_device_module(kind), "is_available", lambda: True)
        monkeypatch.setattr(torch.get_device_module(kind), "device_count", lambda: 1)
        assert cluster._choose_device("auto", RankFacts()).type == taken


@pytest.mark.parametrize(
    ("kind", "joined"),
    [("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl"), ("cpu", "gloo")],
)
def test_each_device_has_its_backend(kind: str, joined: str) -> None:
    device = torch.device(kind)
    assert cluster._beside_gloo(device, cluster._choose_backend("auto", device)) == joined


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)])
def test_ranks_that_count_themselves_differently_are_told_so_on_each(
    sizes: tuple[int, int],
) -> None:
    """They waited until the timeout, and nothing named WORLD_SIZE."""
    port = free_port()

    def meet(rank: int) -> str:
        facts = RankFacts(rank, rank, sizes[rank], sizes[rank], 0, "the script")
        try:
            rendezvous._tcp_store(
                "127.0.0.1", port, facts, datetime.timedelta(seconds=30), hosted_elsewhere=False
            )
        except UsageError as error:
            return error.what
        return "met"

    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(meet, (0, 1)))
    assert said == [f"WORLD_SIZE is {sizes[1]} on rank 1, and {sizes[0]} on rank 0"] * 2
