"""Chooses the cores of a rank: its share of them, next to its GPU.

Each rank is bound to the NUMA node of its GPU; without GPUs, ranks are assigned to the nodes in
order. Earlier limits (taskset, a container, Slurm's binding) are never widened. Source:
/sys/devices/system/node, /sys/bus/pci (kernel.org/doc/Documentation/ABI); /proc/driver/nvidia/gpus
has a folder for each GPU. Loads torch inside functions only.
"""

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

# of NumPy's own build, and of others, with integers of 64 bits and of 32
_OPENBLAS_SETS_THREADS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)

_before: set[int] | None = None  # the cores allowed before `bind`
_node: int | None = None


def allowed() -> set[int]:
    """Return the cores allowed to this process before it was bound."""
    if _before is not None:
        return _before
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def threads_per_rank(local_world_size: int) -> int:
    """Return the allowed cores divided by the ranks on this machine; at least 1."""
    return max(1, len(allowed()) // max(1, local_world_size))


def threads_after_fork() -> None:
    """Give a fork of a process that has set torch's number of threads the same number.

    The first call after a fork replaces a pool of threads. Autograd's threads, which all make it
    as they start, may find none meanwhile, and abort the process: "Invalid thread pool!", SIGABRT.
    This one call comes before theirs. (Seen with torch's CUDA build on a machine without a GPU,
    which has eight such threads once a `FakeTensorMode` was used.)
    """
    import torch

    torch.set_num_threads(torch.get_num_threads())


def set_threads(number: int) -> None:
    """Set the threads of torch and of NumPy's OpenBLAS, as OMP_NUM_THREADS does where they load."""
    import torch

    torch.set_num_threads(number)
    if "OPENBLAS_NUM_THREADS" in os.environ:
        return
    lines = _text(Path("/proc/self/maps")).splitlines()
    for library in {line.split()[-1] for line in lines if "openblas" in line}:
        loaded = ctypes.CDLL(library)
        for name in _OPENBLAS_SETS_THREADS:
            with suppress(AttributeError):
                getattr(loaded, name)(number)
                break


def bound_node() -> int | None:
    """Return the NUMA node to which `bind` has bound this process."""
    return _node


def bind(local_rank: int, local_world_size: int, root: Path = Path("/")) -> int | None:
    """Bind this process to the cores of its NUMA node, before libraries create threads.

    Return the node, or None.
    """
    global _before, _node
    if not hasattr(os, "sched_setaffinity") or local_world_size < 2:
        return None
    free = allowed()
    nodes = {node: cores & free for node, cores in numa_nodes(root).items() if cores & free}
    node = choose_node(local_rank, local_world_size, nodes, gpu_nodes(os.environ, root))
    if node is None:
        return None
    os.sched_setaffinity(0, nodes[node])
    _before = free
    _node = node
    return node


def bind_again(local_rank: int, local_world_size: int, root: Path = Path("/")) -> int | None:
    """Bind this process, with all of its threads, as the rank that it has become.

    Return the node, or None. The number of threads stays: another one may change sums in the last
    bit.
    """
    global _before, _node
    was_bound = _before is not None
    if _before is not None:
        os.sched_setaffinity(0, _before)
    _before = None
    _node = None
    node = bind(local_rank, local_world_size, root)
    if was_bound or node is not None:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(int(thread), os.sched_getaffinity(0))
    return node


def choose_node(
    local_rank: int, local_world_size: int, nodes: Mapping[int, set[int]], gpus: list[int] | None
) -> int | None:
    """Return the NUMA node for a rank.

    None if there is no choice, or the node of its GPU is unknown.
    """
    if len(nodes) < 2 or gpus is None:
        return None
    if not gpus:
        return sorted(nodes)[local_rank * len(nodes) // local_world_size]
    if local_rank >= len(gpus) or gpus[local_rank] not in nodes:
        return None
    return gpus[local_rank]


def numa_nodes(root: Path = Path("/")) -> dict[int, set[int]]:
    """Return NUMA node → its cores, without nodes that have only memory."""
    found = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        try:
            parts = [
                part.partition("-")
                for part in (folder / "cpulist").read_text().strip().split(",")
                if part
            ]
            cores = {
                core for low, _, high in parts for core in range(int(low), int(high or low) + 1)
            }
        except (OSError, ValueError):
            continue
        if cores:
            found[int(folder.name.removeprefix("node"))] = cores
    return found


def gpu_nodes(environ: Mapping[str, str], root: Path) -> list[int] | None:
    """Return the NUMA node of each GPU in this process's numbering; empty: there are no GPUs.

    None: it is unknown.

    CUDA numbers the fastest first if there are several models; a virtual machine may lack the
    information.
    """
    folders = sorted((root / "proc/driver/nvidia/gpus").glob("*:*"))
    models = {_line(folder / "information", "Model:") for folder in folders}
    if len(models) > 1 and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return None
    found = []
    for folder in folders:
        try:
            found.append(
                int((root / "sys/bus/pci/devices" / folder.name.lower() / "numa_node").read_text())
            )
        except (OSError, ValueError):
            return None
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        try:
            found = [found[int(index)] for index in visible.split(",") if index.strip()]
        except (ValueError, IndexError):
            return None
    return None if -1 in found else found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _line(path: Path, name: str) -> str:
    lines = _text(path).splitlines()
    return next((line.removeprefix(name).strip() for line in lines if line.startswith(name)), "")
