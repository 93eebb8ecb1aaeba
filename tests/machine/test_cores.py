"""Cores and NUMA nodes, as a machine's /sys and /proc tell of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.machine import cores
from tests.ranks import REPOSITORY

NODES = {0: {0, 1, 2, 3}, 1: {4, 5, 6, 7}}


def machine(
    root: Path,
    nodes: dict[int, str],
    gpus: dict[str, int | None] | None = None,
    model: str = "H100",
) -> Path:
    """A tree like that of the kernel: NUMA node → its cores; PCI address of a GPU → its node (None:
    the file lacks).
    """
    for node, cpulist in nodes.items():
        folder = root / f"sys/devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpulist}\n")
    for number, (address, node) in enumerate((gpus or {}).items()):
        told = root / "proc/driver/nvidia/gpus" / address
        told.mkdir(parents=True)
        name = model if "," not in model else model.split(",")[number]
        (told / "information").write_text(f"Model: \t\t {name}\nIRQ: 1\n")
        device = root / "sys/bus/pci/devices" / address.lower()
        device.mkdir(parents=True)
        if node is not None:
            (device / "numa_node").write_text(f"{node}\n")
    return root


EIGHT = {
    f"0000:{bus}:00.0": node
    for bus, node in zip(
        ("1B", "43", "52", "61", "9D", "C3", "D1", "DF"), [0] * 4 + [1] * 4, strict=True
    )
}


def test_nodes_and_their_cores_are_read(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-3,8-11", 1: "4-7,12-15", 2: ""})
    assert cores.numa_nodes(root) == {
        0: {0, 1, 2, 3, 8, 9, 10, 11},
        1: {4, 5, 6, 7, 12, 13, 14, 15},
    }
    assert cores.numa_nodes(tmp_path / "nothing") == {}


def test_each_gpu_has_the_node_that_its_slot_has(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0-3", 1: "4-7"}, EIGHT)
    assert cores.gpu_nodes({}, root) == [0, 0, 0, 0, 1, 1, 1, 1]
    assert cores.gpu_nodes({"CUDA_VISIBLE_DEVICES": "7,0"}, root) == [1, 0]
    assert cores.gpu_nodes({"CUDA_VISIBLE_DEVICES": ""}, root) == []
    assert cores.gpu_nodes({"CUDA_VISIBLE_DEVICES": "GPU-3ab1,0"}, root) is None, (
        "a serial number says no slot"
    )
    assert cores.gpu_nodes({"CUDA_VISIBLE_DEVICES": "9"}, root) is None
    assert cores.gpu_nodes({}, tmp_path / "nothing") == []


@pytest.mark.parametrize(
    ("gpus", "model", "environ", "expected"),
    [
        ({"0000:1B:00.0": -1}, "H100", {}, None),  # a virtual machine
        ({"0000:1B:00.0": None}, "H100", {}, None),
        # CUDA numbers the fastest first
        ({"0000:1B:00.0": 1, "0000:43:00.0": 0}, "A100,H100", {}, None),
        (
            {"0000:1B:00.0": 1, "0000:43:00.0": 0},
            "A100,H100",
            {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            [1, 0],
        ),
    ],
)
def test_where_the_machine_does_not_say_nothing_is_guessed(
    tmp_path: Path,
    gpus: dict[str, int | None],
    model: str,
    environ: dict[str, str],
    expected: list[int] | None,
) -> None:
    assert (
        cores.gpu_nodes(environ, machine(tmp_path, {0: "0-3", 1: "4-7"}, gpus, model)) == expected
    )


def test_a_rank_goes_to_the_node_of_its_gpu_or_is_dealt_out() -> None:
    assert [cores.choose_node(rank, 4, NODES, []) for rank in range(4)] == [0, 0, 1, 1]
    assert [cores.choose_node(rank, 3, NODES, []) for rank in range(3)] == [0, 0, 1]
    assert [cores.choose_node(rank, 4, NODES, [1, 1, 0, 0]) for rank in range(4)] == [1, 1, 0, 0]
    assert cores.choose_node(0, 4, {0: {0, 1}}, []) is None, "one node: nothing to choose"
    assert cores.choose_node(1, 4, NODES, None) is None
    assert cores.choose_node(2, 4, NODES, [0, 1]) is None, "more ranks than GPUs"


_BIND = """
import json, os, sys, threading
from pathlib import Path
from lockstep.machine import cores
rank, world, root, start = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
if start:
    os.sched_setaffinity(0, {int(core) for core in start.split(",")})
node = cores.bind(rank, world, root)
done = threading.Event()
thread = threading.Thread(target=done.wait, daemon=True)
thread.start()
if sys.argv[5]:
    node = cores.bind_again(*map(int, sys.argv[5].split()), root)
own = os.sched_getaffinity(thread.native_id)
assert own == os.sched_getaffinity(0)
done.set()
print(json.dumps([node, sorted(own), cores.threads_per_rank(1), cores.bound_node()]))
"""


def test_processes_are_bound_and_never_to_more_than_they_had(tmp_path: Path) -> None:
    """Real processes; the tree deals this machine's cores out to two nodes."""
    own = sorted(os.sched_getaffinity(0))
    if len(own) < 2:
        pytest.skip("NOT TESTED: needs two cores")
    low = own[:1]
    high = own[1:]
    two = machine(tmp_path / "two", {0: ",".join(map(str, low)), 1: ",".join(map(str, high))})
    one = machine(tmp_path / "one", {0: ",".join(map(str, own))})

    def bound(rank: int, world: int, root: Path, start: str = "", again: str = "") -> list[object]:
        done = subprocess.run(
            [sys.executable, "-c", _BIND, str(rank), str(world), str(root), start, again],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=True,
        )
        found: list[object] = json.loads(done.stdout)
        return found

    assert bound(0, 2, two) == [0, low, len(own), 0]
    assert bound(1, 2, two) == [
        1,
        high,
        len(own),
        1,
    ], "threads are shared out over the machine, not over the node"
    assert bound(1, 2, one) == [None, own, len(own), None]
    assert bound(0, 1, two) == [None, own, len(own), None], "one rank has the machine for itself"
    assert bound(1, 2, two, start=str(own[0])) == [None, low, 1, None]
    assert bound(0, 2, two, again="1 2") == [1, high, len(own), 1], "with the threads that it has"
    assert bound(0, 2, two, again="0 1") == [None, own, len(own), None], "it is alone now"
    assert bound(0, 1, two, again="1 2") == [1, high, len(own), 1]
    both = machine(tmp_path / "both", {0: ",".join(map(str, own)), 1: ",".join(map(str, own))})
    assert bound(0, 2, both, start=str(own[0])) == [
        0,
        low,
        1,
        0,
    ], "what taskset allowed is not widened"
