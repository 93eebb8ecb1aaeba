"""Collects facts about each rank and its machine as plain JSON.

Those of all ranks are then judged: ✓, ⚠ or ✗.

It reads files and the environment; it changes and measures nothing (that is `doctor`).
"""

import functools
import hashlib
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lockstep.diagnose import BAD, GOOD, WARN, Finding
from lockstep.machine import cores
from lockstep.machine.environment import machine_id, rank_facts
from lockstep.report import units

VARIABLES = re.compile(r"^(NCCL|TORCH|GLOO|CUDA|OMP|MKL|PYTORCH|UCX|FI)_")
_MAX_FILES = 5000
_PROGRAM_SECONDS = 20.0  # limit for nvidia-smi, which hangs if a driver or a GPU does


def own_facts(
    config_text: str | None = None, names: Iterable[str] = (), *, device: str = "auto"
) -> dict[str, Any]:
    """Return this rank's facts that cost almost nothing.

    Args:
        config_text: the config, which is compared.
        names: what the config names, whose code is compared.
        device: `distributed.device`; a run on the CPU needs no GPU, and none of them is told.
    """
    return asdict(rank_facts()) | {
        "host": socket.gethostname(),
        "machine": machine_id(),
        "versions": versions(),
        "config": (
            None if config_text is None else hashlib.sha256(config_text.encode()).hexdigest()[:12]
        ),
        "code": code_digest(names),
        "variables": {
            name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)
        },
        "gpus": [] if device == "cpu" else visible_gpus(),
    }


def machine_facts(run_directory: Path) -> dict[str, Any]:
    """Return the machine's limits, memory, disk, CPUs and cards."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    return {
        "limits": {
            name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[0]
            for name in ("NOFILE", "MEMLOCK")
        },
        "shared_memory": _space(Path("/dev/shm")),
        "disk": _space(run_directory),
        "cores": len(cores.allowed()),
        "numa_nodes": len(cores.numa_nodes()) or 1,
        "numa_node": cores.bound_node(),
        "infiniband": {
            f"{port.parts[-4]}:{port.parts[-2]}": port.read_text().strip() for port in ports
        },
        "topology": _output("nvidia-smi", "topo", "-m") if visible_gpus() else "",
    }


def versions() -> dict[str, str]:
    """Return the versions that must be equal on all ranks. Loads torch."""
    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["lockstep"] = own_version()
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        if torch.cuda.is_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    driver = _output(
        "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
    ).splitlines()
    return found | ({"driver": driver[0]} if driver else {})


@functools.cache
def own_version() -> str:
    """Return the version of Lockstep that is installed."""
    with suppress(PackageNotFoundError):
        return version("lockstep-train")
    return "unknown"


def code_digest(names: Iterable[str] = ()) -> str:
    """Return a digest of Lockstep's own files, and of the packages that the config names."""
    folders = []
    for name in sorted(
        {name.partition(":")[0].partition(".")[0] for name in names if ":" in name} - {"__main__"}
    ):
        spec = find_spec(name)
        if (
            spec is None
            or spec.origin is None
            or not spec.has_location
            or "site-packages" in spec.origin
        ):
            # there is no such module, it is built into Python, or the package has a version
            continue
        origin = Path(spec.origin)
        folders.append(origin.parent if origin.name == "__init__.py" else origin)
    digest = own_code().copy()
    for folder in folders:
        _add_code(digest, folder)
    text: str = digest.hexdigest()
    return text[:12]


@functools.cache
def own_code() -> Any:
    """Return the hash of Lockstep's own files, to which further code is added in a copy."""
    digest = hashlib.sha256()
    _add_code(digest, Path(__file__).parent.parent)
    return digest


def _add_code(digest: Any, folder: Path) -> None:
    """Add the modules of a package, or a module that is a file, to a hash."""
    for file in _modules_in(folder)[:_MAX_FILES] if folder.is_dir() else [str(folder)]:
        with open(file, "rb", buffering=0) as opened:
            digest.update(os.path.basename(file).encode() + opened.read())


def _modules_in(folder: Path) -> list[str]:
    """Return the files of a package's modules, in order; `os` takes half the time of `pathlib`."""
    return sorted(
        os.path.join(inside, name)
        for inside, _, names in os.walk(folder)
        for name in names
        if name.endswith(".py")
    )


def visible_gpus() -> list[dict[str, Any]]:
    """Return the GPUs that this process sees."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    links = _links()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = f"GPU-{properties.uuid}"
        own = {
            "model": properties.name,
            "memory": properties.total_memory,
            "uuid": uuid,
            **links.get(uuid, {}),
        }
        others = (other for other in range(torch.cuda.device_count()) if other != index)
        found.append(
            own
            | {"peers": all(torch.cuda.can_device_access_peer(index, other) for other in others)}
        )
    return found


def _links() -> dict[str, dict[str, Any]]:
    """Return each GPU's free memory, largest PCIe generation, and PCIe width (now and at most)."""
    columns = "uuid,memory.free,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max"
    names = ("free", "pcie_gen_max", "pcie_width", "pcie_width_max")
    found: dict[str, dict[str, Any]] = {}
    for row in _output(
        "nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"
    ).splitlines():
        uuid, *cells = [cell.strip() for cell in row.split(",")]
        if len(cells) == len(names):
            found[uuid] = {
                name: int(cell) for name, cell in zip(names, cells, strict=True) if cell.isdigit()
            }
            if "free" in found[uuid]:
                found[uuid]["free"] *= 2**20
    return found


def _differing(values: Mapping[int, Any]) -> dict[str, list[int]]:
    """Return the ranks that have each value, by the value's text."""
    groups: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        groups.setdefault(str(value), []).append(rank)
    return groups


def _space(path: Path) -> dict[str, int] | None:
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    with suppress(OSError):
        usage = shutil.disk_usage(path)
        return {"total": usage.total, "free": usage.free}
    return None


def _output(*command: str) -> str:
    """Return a program's output; empty if it is missing, fails, or does not answer."""
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PROGRAM_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


Facts = Sequence[dict[str, Any]]  # by rank
_GIB = 2**30
# variables of each machine
_MAY_DIFFER = {"CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}

_INEFFECTIVE: tuple[tuple[str, str], ...] = (
    (
        r"(NCCL|GLOO|TORCH_DISTRIBUTED|TORCH_NCCL)_TIMEOUT\w*",
        "does nothing in torch; the timeout is distributed.timeout_seconds",
    ),
    (
        r"NCCL_(BLOCKING_WAIT|ASYNC_ERROR_HANDLING|DESYNC_DEBUG|ENABLE_TIMING|DUMP_ON_TIMEOUT)",
        "is deprecated; it is called TORCH_{} now",
    ),
    (
        r"NCCL_SOCKET_NAME|NCCL_IFNAME|NCCL_SOCKET_INTERFACE",
        "does nothing; it is called NCCL_SOCKET_IFNAME",
    ),
    (
        r"NCCL_(LL_THRESHOLD|TREE_THRESHOLD)",
        "does nothing since NCCL 2.5; NCCL_ALGO and NCCL_PROTO choose",
    ),
    (r"NCCL_RINGS", "does nothing since NCCL 2.5"),
    (
        r"NCCL_MAX_NRINGS|NCCL_MIN_NRINGS",
        "is deprecated; it is called NCCL_MAX_NCHANNELS, NCCL_MIN_NCHANNELS",
    ),
    (r"GLOO_SOCKET_NAME|GLOO_IFNAME", "does nothing; it is called GLOO_SOCKET_IFNAME"),
    (r"TORCH_DISTRIBUTED_BACKEND", "does nothing in torch; it is distributed.backend"),
)
_DANGEROUS = {
    "CUDA_LAUNCH_BLOCKING": "makes every kernel wait for the last; for debugging only",
    "TORCH_DISTRIBUTED_DEBUG=DETAIL": (
        "checks every collective over the network; for debugging only"
    ),
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
    "NCCL_P2P_DISABLE": "sends between GPUs of one machine through the host's memory",
    "NCCL_IB_DISABLE": "leaves InfiniBand and RoCE unused",
    "NCCL_SHM_DISABLE": "sends between ranks of one machine over the network",
}


def equality(facts: Facts) -> Iterator[Finding]:
    """Check what must be equal on all ranks."""
    same: list[str] = []
    for name in sorted({name for one in facts for name in one["versions"]}):
        groups = _differing({one["rank"]: one["versions"].get(name, "none") for one in facts})
        if len(groups) == 1:
            same.append(f"{name} {next(iter(groups))}")
        else:
            found = f"{name} differs: {_who(groups, facts)}"
            yield Finding(BAD, "versions", found, f"install one {name} on all machines")
    if same:
        yield Finding(GOOD, "versions", ", ".join(same) + _on_all(facts))
    for name, what, fix in (
        (
            "code",
            "the code",
            "bring all machines to one version of Lockstep and of your own modules",
        ),
        ("config", "the config", "start every machine with the same file and the same KEY=VALUE"),
    ):
        groups = _differing({one["rank"]: one[name] for one in facts})
        if len(groups) > 1:
            yield Finding(BAD, name, f"{what} differs: {_who(groups, facts)}", fix)
        elif "None" not in groups:
            yield Finding(GOOD, name, f"{next(iter(groups))}{_on_all(facts)}")


def variables(facts: Facts) -> Iterator[Finding]:
    """Check the variables that are set for NCCL, gloo and torch."""
    good = True
    for warning in dict.fromkeys(
        warning for one in facts for warning in variable_warnings(one["variables"])
    ):
        good = False
        yield Finding(
            WARN, "variables", warning, f"unset {warning.split()[0]}, or keep it knowingly"
        )
    for name in sorted({name for one in facts for name in one["variables"]} - _MAY_DIFFER):
        groups = _differing({one["rank"]: one["variables"].get(name, "unset") for one in facts})
        if len(groups) > 1:
            good = False
            found = f"{name} differs: {_who(groups, facts)}"
            yield Finding(WARN, "variables", found, "set it on all machines: distributed.env does")
    if good:
        shown = ", ".join(
            f"{name}={facts[0]['variables'][name]}" for name in sorted(facts[0]["variables"])
        )
        yield Finding(GOOD, "variables", shown or "none is set")


def variable_warnings(variables: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable that does nothing, is deprecated, or makes runs slow."""
    found = []
    for name, value in sorted(variables.items()):
        found += [
            f"{name} {text.format(name)}"
            for pattern, text in _INEFFECTIVE
            if re.fullmatch(pattern, name)
        ]
        text = _DANGEROUS.get(f"{name}={value}") or (
            "" if value in ("", "0") else _DANGEROUS.get(name, "")
        )
        if text:
            found.append(f"{name} {text}")
    return found


def gpus(facts: Facts) -> Iterator[Finding]:
    """Check the GPUs' models, memory and links."""
    counts = _differing({one["rank"]: len(one["gpus"]) for one in facts})
    if list(counts) == ["0"]:
        yield Finding(
            GOOD,
            "GPUs",
            "none is used: runs use the CPU and gloo; nothing about GPUs was checked",
        )
        return
    if len(counts) > 1:
        found = f"ranks see different numbers of GPUs: {_who(counts, facts)}"
        yield Finding(
            BAD, "GPUs", found, "compare `nvidia-smi` and CUDA_VISIBLE_DEVICES on the machines"
        )
    for one in facts:
        if one["local_rank"] >= len(one["gpus"]) > 0:
            found = (
                f"rank {one['rank']} has no GPU of its own: {len(one['gpus'])} for"
                f" {one['local_world_size']} ranks on {one['host']}"
            )
            yield Finding(BAD, "GPUs", found, f"--nproc-per-node {len(one['gpus'])}")
    yield _gpu_models(facts)
    own = {
        one["rank"]: one["gpus"][one["local_rank"]]
        for one in facts
        if one["local_rank"] < len(one["gpus"])
    }
    yield from _gpu_memory(own)
    yield from _pcie(own, facts)


def _gpu_models(facts: Facts) -> Finding:
    """Return whether all GPUs are of one model."""
    models = _differing(
        {one["rank"]: sorted({gpu["model"] for gpu in one["gpus"]}) for one in facts}
    )
    found = "; ".join(f"{text.strip('[]')} (rank {_ranks(who)})" for text, who in models.items())
    return Finding.warn_unless(
        len(models) == 1, "GPUs", found, "the slowest model sets the pace; choose equal machines"
    )


def _gpu_memory(own: Mapping[int, dict[str, Any]]) -> Iterator[Finding]:
    """Check that the GPU of each rank is free."""
    for rank, gpu in own.items():
        if gpu.get("free", gpu["memory"]) < 0.9 * gpu["memory"]:
            found = f"rank {rank}: {units.size(gpu['free'])} of {units.size(gpu['memory'])} is free"
            yield Finding(
                WARN, "GPU memory", found, "another process holds the rest: `nvidia-smi` names it"
            )


def _pcie(own: Mapping[int, dict[str, Any]], facts: Facts) -> Iterator[Finding]:
    """Check the slots of the ranks' GPUs.

    Of generations the largest counts: idle GPUs lower it.
    """
    known = {rank: gpu for rank, gpu in own.items() if "pcie_width" in gpu}
    for rank, gpu in known.items():
        if gpu["pcie_width"] < gpu.get("pcie_width_max", 0):
            found = f"rank {rank}: PCIe width {gpu['pcie_width']} of {gpu['pcie_width_max']}"
            yield Finding(
                WARN, "PCIe", found, "reseat the card, or move it to a slot of full width"
            )
    groups = _differing(
        {
            r: f"generation {g.get('pcie_gen_max', '?')} × {g['pcie_width']}"
            for r, g in known.items()
        }
    )
    if groups:
        same = len(groups) == 1
        text = next(iter(groups)) + _on_all(facts) if same else _who(groups, facts)
        yield Finding.warn_unless(same, "PCIe", text, "the slowest slot sets the pace")


def topology(facts: Facts) -> Iterator[Finding]:
    """Check how the GPUs of each machine are connected, and whether they have peer access.

    They may be connected by NVLink, by PCIe, or across sockets.
    """
    for one in (one for one in facts if one["local_rank"] == 0 and len(one["gpus"]) > 1):
        rows = [row.split() for row in one["topology"].splitlines() if row.startswith("GPU")]
        count = len(one["gpus"])
        links = {
            cell
            for row in rows
            for cell in row[1 : count + 1]
            if cell not in ("X", "") and "GPU" not in cell
        }
        if links:
            found = f"{count} GPUs joined by {', '.join(sorted(links))}{_at(one, facts)}"
            do = "bind ranks to one socket, or use fewer GPUs a job: traffic crosses the CPUs' link"
            yield Finding.warn_unless("SYS" not in links, "topology", found, do)
        alone = [index for index, gpu in enumerate(one["gpus"]) if not gpu.get("peers", True)]
        if alone:
            found = f"GPU {_ranks(alone)} can't reach its peers' memory{_at(one, facts)}"
            do = "a virtual machine or ACS in the BIOS forbids it; NCCL goes through the host"
            yield Finding(WARN, "P2P", found, do)


def limits(facts: Facts) -> Iterator[Finding]:
    """Check ulimits, shared memory and cores: one line each, of the worst machine."""
    machines = [one for one in facts if one["local_rank"] == 0]
    files = min(machines, key=lambda one: (one["limits"]["NOFILE"] == -1, one["limits"]["NOFILE"]))
    count = files["limits"]["NOFILE"]
    found = f"{'unlimited' if count == -1 else count}{_at(files, facts)}"
    yield Finding.warn_unless(
        count == -1 or count >= 4096, "open files", found, "ulimit -n 65536 before the start"
    )
    for one in machines:
        active = [port for port, state in one["infiniband"].items() if "ACTIVE" in state]
        if one["infiniband"]:
            found = f"{len(active)} of {len(one['infiniband'])} ports are active{_at(one, facts)}"
            do = "`ibstat`, the cable and the subnet manager; NCCL_IB_DISABLE=1 runs without"
            yield Finding.warn_unless(bool(active), "InfiniBand", found, do)
        if active and one["limits"]["MEMLOCK"] != -1:
            yield Finding(
                WARN,
                "locked memory",
                f"limited to {one['limits']['MEMLOCK']} bytes{_at(one, facts)}",
                "ulimit -l unlimited: InfiniBand registers memory",
            )
    known = [one for one in machines if one["shared_memory"]]
    if known:
        least = min(known, key=lambda one: one["shared_memory"]["free"])
        free = least["shared_memory"]["free"]
        found = f"{units.size(free)} free in /dev/shm{_at(least, facts)}"
        do = "docker run --shm-size=8g: data workers and NCCL need it"
        yield Finding.warn_unless(free >= _GIB, "shared memory", found, do)
    for one in machines:
        setting = one["variables"].get("OMP_NUM_THREADS", "").split(",")[0].strip()
        threads = int(setting) if setting.isdecimal() else 1  # OpenMP ignores other text
        if threads * one["local_world_size"] > one["cores"]:
            found = (
                f"{one['local_world_size']} ranks × {threads} threads on {one['cores']}"
                f" cores{_at(one, facts)}"
            )
            yield Finding(WARN, "CPU", found, "fewer ranks, or OMP_NUM_THREADS lower")
    cores = ", ".join(
        dict.fromkeys(f"{one['cores']} cores, {one['numa_nodes']} NUMA node(s)" for one in machines)
    )
    bound = [one["numa_node"] for one in facts if one["machine"] == machines[0]["machine"]]
    where = "" if None in bound else f", bound to NUMA nodes {', '.join(map(str, bound))}"
    yield Finding(GOOD, "CPU", f"{cores} for {len(bound)} rank(s) per machine{where}")


def disk(facts: Facts) -> Iterator[Finding]:
    """Check free space, speed, and whether machines share the run directory."""
    machines = [one for one in facts if one["local_rank"] == 0]
    for one in machines:
        if "disk_error" in one:
            found = f"the run directory can't be written: {one['disk_error']}{_at(one, facts)}"
            do = "--output-dir somewhere that is yours and is there; see the mount and its rights"
            yield Finding(BAD, "disk", found, do)
        free = (one["disk"] or {"free": 0})["free"]
        status = GOOD
        if free < 10 * _GIB:
            status = BAD if free < _GIB else WARN
        speed = one.get("disk_speed")
        text = f"{units.size(free)} free" + (
            f", written and synced at {units.size(speed)}/s" if speed else ""
        )
        do = "" if status == GOOD else "free space, or --output-dir elsewhere"
        yield Finding(status, "disk", text + _at(one, facts), do)
    if len(machines) > 1:
        shared = all(one.get("sees_run_directory") for one in machines)
        found = (
            "all machines see one run directory"
            if shared
            else "machines do not share the run directory"
        )
        do = "checkpoint.format: full works so; sharded needs one folder that all machines share"
        yield Finding.warn_unless(shared, "shared folder", found, do)


CHEAP: tuple[Callable[[Facts], Iterator[Finding]], ...] = (equality, variables, gpus)
ALL = (*CHEAP, topology, limits, disk)


def _who(groups: dict[str, list[int]], facts: Facts) -> str:
    hosts = {one["rank"]: one["host"] for one in facts}
    return ", ".join(
        f"{value} on rank {_ranks(ranks)} ({hosts[ranks[0]]})" for value, ranks in groups.items()
    )


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown} and {len(ranks) - 4} more"


def _on_all(facts: Facts) -> str:
    return "" if len(facts) == 1 else f" on all {len(facts)} ranks"


def _at(one: dict[str, Any], facts: Facts) -> str:
    return (
        f" on {one['host']} (rank {one['rank']})"
        if len({other["machine"] for other in facts}) > 1
        else ""
    )
