"""Collects facts about one rank and its machine as plain JSON; rank 0 compares the facts of all ranks.

It reads files and the environment; it changes and measures nothing (that is `doctor`).
"""

import hashlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep import cores
from lockstep.environment import machine_id, rank_facts

VARIABLES = re.compile(r"^(NCCL|TORCH|GLOO|CUDA|OMP|MKL|PYTORCH|UCX|FI)_")
_MAX_FILES = 5000
_PROGRAM_SECONDS = 20.0  # limit for nvidia-smi, which hangs if a driver or a GPU does


def own_facts(config_text: str | None = None, names: Iterable[str] = ()) -> dict[str, Any]:
    """Return this rank's facts that cost almost nothing.

    Args:
        config_text: the resolved config, to be compared between ranks; or None.
        names: `package.module:Name` of what the config names; their code is compared too.
    """
    facts = rank_facts()
    return {
        "rank": facts.rank,
        "local_rank": facts.local_rank,
        "local_world_size": facts.local_world_size,
        "launcher": facts.launcher,
        "host": socket.gethostname(),
        "machine": machine_id(),
        "versions": versions(),
        "config": None if config_text is None else _digest(config_text.encode()),
        "code": code_digest(names),
        "variables": {name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)},
        "gpus": gpus(),
    }


def machine_facts(run_directory: Path) -> dict[str, Any]:
    """Return the machine's limits, memory, disk, CPUs and cards."""
    return {
        "limits": {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0] for name in ("NOFILE", "MEMLOCK")},
        "shared_memory": _space(Path("/dev/shm")),
        "disk": _space(run_directory),
        "cores": len(cores.allowed()),
        "numa_nodes": len(cores.numa_nodes()) or 1,
        "numa_node": cores.bound_node(),
        "infiniband": infiniband(),
        "topology": _output("nvidia-smi", "topo", "-m") if gpus() else "",
    }


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks. Loads torch."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "lockstep": _version("lockstep-train")}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        if torch.cuda.is_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return found | ({"driver": driver[0]} if driver else {})


def code_digest(names: Iterable[str] = ()) -> str:
    """Return a digest of Lockstep's own files, and of the packages that the config names."""
    folders = [Path(__file__).parent.parent]
    for name in sorted({name.partition(":")[0].partition(".")[0] for name in names if ":" in name} - {"__main__"}):
        spec = find_spec(name)
        if spec is None or spec.origin is None or not spec.has_location or "site-packages" in spec.origin:
            continue  # there is no such module, it is built into Python, or the package has a version
        origin = Path(spec.origin)
        folders.append(origin.parent if origin.name == "__init__.py" else origin)
    digest = hashlib.sha256()
    for folder in folders:
        files = sorted(folder.rglob("*.py"))[:_MAX_FILES] if folder.is_dir() else [folder]
        for file in files:
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs that this process sees."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    links = _links()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = f"GPU-{properties.uuid}"
        own = {"model": properties.name, "memory": properties.total_memory, "uuid": uuid, **links.get(uuid, {})}
        others = (other for other in range(torch.cuda.device_count()) if other != index)
        found.append(own | {"peers": all(torch.cuda.can_device_access_peer(index, other) for other in others)})
    return found


def _links() -> dict[str, dict[str, Any]]:
    """Return each GPU's free memory, PCIe generation and width (now and at most)."""
    columns = ("uuid", "memory.free", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current",
               "pcie.link.width.max")  # fmt: skip
    names = ("free", "pcie_gen", "pcie_gen_max", "pcie_width", "pcie_width_max")
    rows = _output("nvidia-smi", f"--query-gpu={','.join(columns)}", "--format=csv,noheader,nounits").splitlines()
    cells = [[cell.strip() for cell in row.split(",")] for row in rows]
    return {
        row[0]: {name: int(cell) * (2**20 if name == "free" else 1) for name, cell in zip(names, row[1:], strict=True)
                 if cell.isdigit()}
        for row in cells if len(row) == len(columns)
    }  # fmt: skip


def infiniband() -> dict[str, str]:
    """Return the ports of InfiniBand or RoCE cards and their state."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    return {f"{port.parts[-4]}:{port.parts[-2]}": port.read_text().strip() for port in ports}


def differing(values: Mapping[int, Any]) -> dict[str, list[int]]:
    """Return the ranks that have each value, by the value's text."""
    groups: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(str(value), []).append(rank)
    return groups


def _space(path: Path) -> dict[str, int] | None:
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return {"total": usage.total, "free": usage.free}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _output(*command: str) -> str:
    """Return a program's output; empty if it is missing, fails, or does not answer."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROGRAM_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
