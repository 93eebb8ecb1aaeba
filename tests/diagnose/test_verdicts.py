"""What the doctor says of facts, whatever machine they come from."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lockstep.diagnose import BAD, GOOD, WARN, Finding, verdicts
from lockstep.diagnose.verdicts import variable_warnings

GIB = 2**30
H100 = {
    "model": "H100",
    "memory": 80 * GIB,
    "free": 79 * GIB,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_gen_max": 5,
    "peers": True,
}
Change = Callable[[dict[str, Any]], object]


def rank(number: int, **changes: Any) -> dict[str, Any]:
    """Two ranks a machine, each with what it needs."""
    return {
        "rank": number,
        "local_rank": number % 2,
        "local_world_size": 2,
        "launcher": "torchrun",
        "host": f"host{number // 2}",
        "machine": f"m{number // 2}",
        "config": "c0ffee",
        "code": "abc123",
        "versions": {"python": "3.11.7", "torch": "2.13.0", "nccl": "2.27.3"},
        "variables": {"OMP_NUM_THREADS": "4"},
        "gpus": [H100, H100],
        "limits": {"NOFILE": 65536, "MEMLOCK": -1},
        "infiniband": {"mlx5_0:1": "4: ACTIVE"},
        "shared_memory": {"total": 64 * GIB, "free": 60 * GIB},
        "disk": {"total": 900 * GIB, "free": 800 * GIB},
        "disk_speed": 2 * GIB,
        "sees_run_directory": True,
        "cores": 64,
        "numa_nodes": 2,
        "numa_node": number % 2,
        "topology": "",
    } | changes


def lines(changed: dict[str, Any] | None = None, which: int = 3) -> list[Finding]:
    facts = [rank(number, **((changed or {}) if number == which else {})) for number in range(4)]
    return [line for verdict in verdicts.ALL for line in verdict(facts)]


def test_a_sound_cluster_gets_nothing_to_do() -> None:
    found = lines()
    assert {line.status for line in found} == {GOOD}
    assert not any(line.do for line in found)
    names = {line.name for line in found}
    assert names >= {
        "versions",
        "code",
        "config",
        "variables",
        "GPUs",
        "PCIe",
        "open files",
        "shared memory",
        "disk",
        "CPU",
        "shared folder",
        "InfiniBand",
    }


@pytest.mark.parametrize(
    ("changed", "status", "name", "text"),
    [
        (
            {"versions": {"python": "3.11.7", "torch": "2.12.0", "nccl": "2.27.3"}},
            BAD,
            "versions",
            "torch differs: 2.13.0 on rank 0, 1, 2 (host0), 2.12.0 on rank 3 (host1)",
        ),
        (
            {"versions": {"python": "3.12.1", "torch": "2.13.0", "nccl": "2.27.3"}},
            BAD,
            "versions",
            "python differs",
        ),
        ({"versions": {"python": "3.11.7", "torch": "2.13.0"}}, BAD, "versions", "none on rank 3"),
        ({"code": "0ld"}, BAD, "code", "0ld on rank 3 (host1)"),
        ({"config": "other"}, BAD, "config", "other on rank 3"),
        ({"gpus": []}, BAD, "GPUs", "different numbers of GPUs"),
        ({"gpus": [H100]}, BAD, "GPUs", "rank 3 has no GPU of its own: 1 for 2 ranks on host1"),
        ({"gpus": [H100, H100 | {"model": "A100"}]}, WARN, "GPUs", "A100"),
        (
            {"gpus": [H100, H100 | {"free": 9 * GIB}]},
            WARN,
            "GPU memory",
            "rank 3: 9 GiB of 80 GiB is free",
        ),
        ({"gpus": [H100, H100 | {"pcie_width": 4}]}, WARN, "PCIe", "rank 3: PCIe width 4 of 16"),
        (
            {"gpus": [H100, H100 | {"pcie_gen_max": 3}]},
            WARN,
            "PCIe",
            "generation 3 × 16 on rank 3 (host1)",
        ),
        (
            {"variables": {"OMP_NUM_THREADS": "4", "NCCL_TIMEOUT": "9"}},
            WARN,
            "variables",
            "NCCL_TIMEOUT does nothing",
        ),
        (
            {"variables": {"OMP_NUM_THREADS": "4", "NCCL_IB_HCA": "x"}},
            WARN,
            "variables",
            "NCCL_IB_HCA differs",
        ),
    ],
)
def test_one_rank_that_differs_is_named(
    changed: dict[str, Any], status: str, name: str, text: str
) -> None:
    (line,) = [line for line in lines(changed) if text in line.found]
    assert (line.status, line.name) == (status, name)
    assert line.do


@pytest.mark.parametrize(
    ("changed", "status", "name", "text"),
    [
        ({"limits": {"NOFILE": 1024, "MEMLOCK": -1}}, WARN, "open files", "1024 on host1"),
        (
            {"limits": {"NOFILE": 65536, "MEMLOCK": 65536}},
            WARN,
            "locked memory",
            "limited to 65536 bytes on host1",
        ),
        (
            {"infiniband": {"mlx5_0:1": "1: DOWN"}},
            WARN,
            "InfiniBand",
            "0 of 1 ports are active on host1",
        ),
        (
            {"shared_memory": {"total": 2**26, "free": 2**26}},
            WARN,
            "shared memory",
            "64 MiB free in /dev/shm on host1",
        ),
        ({"disk": {"total": GIB, "free": 2**20}}, BAD, "disk", "1 MiB free"),
        (
            {"disk_error": "Read-only file system: /runs"},
            BAD,
            "disk",
            "can't be written: Read-only file system: /runs",
        ),
        ({"sees_run_directory": False}, WARN, "shared folder", "do not share the run directory"),
        ({"cores": 2}, WARN, "CPU", "2 ranks × 4 threads on 2 cores on host1"),
        (
            {"topology": "GPU0 X SYS 0-31 0\nGPU1 SYS X 32-63 1"},
            WARN,
            "topology",
            "2 GPUs joined by SYS on host1",
        ),
        (
            {"topology": "GPU0 X NV18 0-31 0\nGPU1 NV18 X 0-31 0"},
            GOOD,
            "topology",
            "2 GPUs joined by NV18 on host1",
        ),
        (
            {"gpus": [H100, H100 | {"peers": False}]},
            WARN,
            "P2P",
            "GPU 1 can't reach its peers' memory on host1",
        ),
    ],
)
def test_one_machine_that_is_unfit_is_named(
    changed: dict[str, Any], status: str, name: str, text: str
) -> None:
    (line,) = [line for line in lines(changed, which=2) if text in line.found]
    assert (line.status, line.name) == (status, name)
    assert bool(line.do) == (status != GOOD)


def test_a_variable_that_openmp_passes_over_stops_no_doctor() -> None:
    found = lines({"variables": {"OMP_NUM_THREADS": "many"}}, which=2)
    assert not any("threads" in line.found for line in found)


def test_no_gpu_anywhere_is_said_and_nothing_is_claimed() -> None:
    facts = [rank(number, gpus=[]) for number in range(2)]
    (line,) = verdicts.gpus(facts)
    assert "nothing about GPUs was checked" in line.found


def test_trap_34_variables_that_do_nothing_are_marked() -> None:
    """NCCL_TIMEOUT* does nothing in torch, nor do names that guides have got wrong."""
    useless = (
        "NCCL_TIMEOUT",
        "NCCL_TIMEOUT_SECONDS",
        "GLOO_TIMEOUT_SECONDS",
        "TORCH_DISTRIBUTED_BACKEND",
    )
    assert [
        remark.split()[0] for remark in variable_warnings(dict.fromkeys(useless, "1"))
    ] == sorted(useless)
    assert variable_warnings({"NCCL_BLOCKING_WAIT": "1"}) == [
        "NCCL_BLOCKING_WAIT is deprecated; it is called TORCH_NCCL_BLOCKING_WAIT now"
    ]
    useful = {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "INFO",
        "TORCH_DISTRIBUTED_DEBUG": "INFO",
        "NCCL_IB_HCA": "x",
    }
    assert variable_warnings(useful) == []
    assert variable_warnings({"CUDA_LAUNCH_BLOCKING": "0"}) == []
    assert "debugging" in variable_warnings({"CUDA_LAUNCH_BLOCKING": "1"})[0]


def test_interfaces_may_have_other_names_on_other_machines() -> None:
    """The launcher of each machine takes the one on the route, and says so in these variables."""
    names = {
        "GLOO_SOCKET_IFNAME": "ens3",
        "NCCL_SOCKET_IFNAME": "=ens3",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    facts = [rank(0), rank(1, variables=rank(1)["variables"] | names)]
    assert [line.status for line in verdicts.variables(facts)] == [GOOD]


def test_lines_read_well() -> None:
    assert (
        str(Finding(WARN, "disk", "5 GiB free", "free space"))
        == "⚠ disk             5 GiB free\n                   do: free space"
    )
    assert Finding(BAD, "x", "y").as_dict() == {
        "status": "bad",
        "name": "x",
        "found": "y",
        "do": "",
    }


def _all(facts: list[dict[str, Any]]) -> Iterator[Finding]:
    for verdict in verdicts.CHEAP:
        yield from verdict(facts)


def test_the_cheap_half_needs_only_cheap_facts() -> None:
    costly = (
        "limits",
        "disk",
        "shared_memory",
        "infiniband",
        "topology",
        "disk_speed",
        "cores",
        "numa_nodes",
    )
    facts = [
        {name: value for name, value in rank(number).items() if name not in costly}
        for number in range(2)
    ]
    assert {line.status for line in _all(facts)} == {GOOD}
