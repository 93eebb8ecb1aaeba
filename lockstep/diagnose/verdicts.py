"""Facts of all ranks in, lines out: ✓ all is well, ⚠ it runs but, ✗ it will not run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.diagnose.facts import differing
from lockstep.diagnose.variables import remarks
from lockstep.report import words

Facts = Sequence[dict[str, Any]]  # by rank
GOOD, WARN, BAD = "✓", "⚠", "✗"
_GIB = 2**30
_OF_EACH_MACHINE = {"CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}  # variables that may differ


@dataclass(frozen=True)
class Line:
    """One finding.

    Attributes:
        status: ✓, ⚠ or ✗.
        name: what was looked at.
        found: what it is like.
        do: what to do about it, where there is something to do.
    """

    status: str
    name: str
    found: str
    do: str = ""

    def __str__(self) -> str:
        text = f"{self.status} {self.name:<16} {self.found}"
        return f"{text}\n  {'':<16} do: {self.do}" if self.do else text

    def as_dict(self) -> dict[str, str]:
        words = {GOOD: "good", WARN: "warning", BAD: "bad"}
        return asdict(self) | {"status": words[self.status]}


def equality(facts: Facts) -> Iterator[Line]:
    """What must be equal on all ranks."""
    names = sorted({name for one in facts for name in one["versions"]})
    same: list[str] = []
    for name in names:
        groups = differing({one["rank"]: one["versions"].get(name, "none") for one in facts})
        if len(groups) == 1:
            same.append(f"{name} {next(iter(groups))}")
        else:
            yield Line(BAD, "versions", f"{name} differs: {_who(groups, facts)}", f"install one {name} on all machines")
    if same:
        yield Line(GOOD, "versions", ", ".join(same) + _on_all(facts))
    for name, what, mend in (
        ("code", "the code", "bring all machines to one version of Lockstep and of your own modules"),
        ("config", "the config", "start every machine with the same file and the same KEY=VALUE"),
    ):
        groups = differing({one["rank"]: one[name] for one in facts})
        if len(groups) > 1:
            yield Line(BAD, name, f"{what} differs: {_who(groups, facts)}", mend)
        elif "None" not in groups:
            yield Line(GOOD, name, f"{next(iter(groups))}{_on_all(facts)}")


def variables(facts: Facts) -> Iterator[Line]:
    """Those that are set for NCCL, gloo and torch."""
    said = list(dict.fromkeys(remark for one in facts for remark in remarks(one["variables"])))
    for remark in said:
        yield Line(WARN, "variables", remark, f"unset {remark.split()[0]}, or keep it knowingly")
    names = {name for one in facts for name in one["variables"]} - _OF_EACH_MACHINE
    unequal = [name for name in sorted(names) if len(differing(_values(facts, name))) > 1]
    for name in unequal:
        found = f"{name} differs: {_who(differing(_values(facts, name)), facts)}"
        yield Line(WARN, "variables", found, "set it on all machines: distributed.env does")
    if not said and not unequal:
        shown = ", ".join(f"{name}={facts[0]['variables'][name]}" for name in sorted(facts[0]["variables"]))
        yield Line(GOOD, "variables", shown or "none is set")


def gpus(facts: Facts) -> Iterator[Line]:
    """Models, memory, links; where there are none, that."""
    counts = differing({one["rank"]: len(one["gpus"]) for one in facts})
    if list(counts) == ["0"]:
        yield Line(GOOD, "GPUs", "none is visible to any rank: runs use the CPU and gloo; nothing of GPUs was checked")
        return
    if len(counts) > 1:
        found = f"ranks see different numbers of GPUs: {_who(counts, facts)}"
        yield Line(BAD, "GPUs", found, "compare `nvidia-smi` and CUDA_VISIBLE_DEVICES on the machines")
    for one in facts:
        if one["local_rank"] >= len(one["gpus"]) > 0:
            yield Line(
                BAD, "GPUs", f"rank {one['rank']} has no GPU of its own: {len(one['gpus'])} for "
                f"{one['local_world_size']} ranks on {one['host']}", f"--nproc-per-node {len(one['gpus'])}",
            )  # fmt: skip
    models = differing({one["rank"]: sorted({gpu["model"] for gpu in one["gpus"]}) for one in facts})
    status, do = (GOOD, "") if len(models) == 1 else (WARN, "the slowest model sets the pace; choose equal machines")
    yield Line(
        status, "GPUs", "; ".join(f"{text.strip('[]')} (rank {_ranks(who)})" for text, who in models.items()), do
    )
    for one in (one for one in facts if one["local_rank"] < len(one["gpus"])):
        gpu = one["gpus"][one["local_rank"]]
        if gpu.get("free", gpu["memory"]) < 0.9 * gpu["memory"]:
            found = f"rank {one['rank']}: {words.size(gpu['free'])} of {words.size(gpu['memory'])} is free"
            yield Line(WARN, "GPU memory", found, "another process holds the rest: `nvidia-smi` names it")
    yield from _pcie(facts)


def _pcie(facts: Facts) -> Iterator[Line]:
    """Generation and width of each rank's own GPU; the highest generation, for an idle GPU goes down to the first."""
    own = {
        one["rank"]: one["gpus"][one["local_rank"]] for one in facts if one["local_rank"] < len(one["gpus"])
    }  # fmt: skip
    known = {rank: gpu for rank, gpu in own.items() if "pcie_width" in gpu}
    for rank, gpu in known.items():
        if gpu["pcie_width"] < gpu.get("pcie_width_max", 0):
            found = f"rank {rank}: PCIe width {gpu['pcie_width']} of {gpu['pcie_width_max']}"
            yield Line(WARN, "PCIe", found, "reseat the card, or move it to a slot of full width")
    groups = differing({r: f"generation {g.get('pcie_gen_max', '?')} × {g['pcie_width']}" for r, g in known.items()})
    if groups:
        same = len(groups) == 1
        text = next(iter(groups)) + _on_all(facts) if same else _who(groups, facts)
        yield Line(GOOD if same else WARN, "PCIe", text, "" if same else "the slowest slot sets the pace")


def topology(facts: Facts) -> Iterator[Line]:
    """How the GPUs of each machine are joined: NVLink, PCIe, or across sockets; whether they reach each other."""
    for one in (one for one in facts if one["local_rank"] == 0 and len(one["gpus"]) > 1):
        rows = [row.split() for row in one["topology"].splitlines() if row.startswith("GPU")]
        count = len(one["gpus"])
        links = {cell for row in rows for cell in row[1 : count + 1] if cell not in ("X", "") and "GPU" not in cell}
        crossing = "SYS" in links
        do = "bind ranks to one socket, or use fewer GPUs a job: traffic crosses the CPUs' link" if crossing else ""
        if links:
            found = f"{count} GPUs joined by {', '.join(sorted(links))}{_at(one, facts)}"
            yield Line(WARN if crossing else GOOD, "topology", found, do)
        alone = [index for index, gpu in enumerate(one["gpus"]) if not gpu.get("peers", True)]
        if alone:
            found = f"GPU {_ranks(alone)} can't reach its peers' memory{_at(one, facts)}"
            yield Line(
                WARN, "P2P", found, "a virtual machine or ACS in the BIOS forbids it; NCCL goes through the host"
            )


def limits(facts: Facts) -> Iterator[Line]:
    """ulimits, shared memory, cores: one line each, the worst machine's."""
    machines = [one for one in facts if one["local_rank"] == 0]
    files = min(machines, key=lambda one: _unlimited(one["limits"]["NOFILE"]))
    count = files["limits"]["NOFILE"]
    low = _unlimited(count) < 4096
    yield Line(WARN if low else GOOD, "open files", f"{'unlimited' if count == -1 else count}{_at(files, facts)}",
               "ulimit -n 65536 before the start" if low else "")  # fmt: skip
    for one in machines:
        active = [port for port, state in one["infiniband"].items() if "ACTIVE" in state]
        if one["infiniband"]:
            status = GOOD if active else WARN
            do = "" if active else "`ibstat`, the cable and the subnet manager; NCCL_IB_DISABLE=1 runs without"
            yield Line(
                status, "InfiniBand", f"{len(active)} of {len(one['infiniband'])} ports are active{_at(one, facts)}", do
            )
        if active and one["limits"]["MEMLOCK"] != -1:
            yield Line(WARN, "locked memory", f"limited to {one['limits']['MEMLOCK']} bytes{_at(one, facts)}",
                       "ulimit -l unlimited: InfiniBand registers memory")  # fmt: skip
    known = [one for one in machines if one["shared_memory"]]
    if known:
        least = min(known, key=lambda one: one["shared_memory"]["free"])
        free = least["shared_memory"]["free"]
        small = free < _GIB
        yield Line(WARN if small else GOOD, "shared memory", f"{words.size(free)} free in /dev/shm{_at(least, facts)}",
                   "docker run --shm-size=8g: data workers and NCCL need it" if small else "")  # fmt: skip
    for one in machines:
        said = one["variables"].get("OMP_NUM_THREADS", "").split(",")[0].strip()
        threads = int(said) if said.isdecimal() else 1  # OpenMP passes over what is no number
        if threads * one["local_world_size"] > one["cores"]:
            found = f"{one['local_world_size']} ranks × {threads} threads on {one['cores']} cores{_at(one, facts)}"
            yield Line(WARN, "CPU", found, "fewer ranks, or OMP_NUM_THREADS lower")
    cores = ", ".join(dict.fromkeys(f"{one['cores']} cores, {one['numa_nodes']} NUMA node(s)" for one in machines))
    bound = [one["numa_node"] for one in facts if one["machine"] == machines[0]["machine"]]
    where = "" if None in bound else f", bound to NUMA nodes {', '.join(map(str, bound))}"
    yield Line(GOOD, "CPU", f"{cores} for {len(bound)} rank(s) a machine{where}")


def disk(facts: Facts) -> Iterator[Line]:
    """Room, speed, and whether machines share the run directory."""
    machines = [one for one in facts if one["local_rank"] == 0]
    for one in machines:
        if "disk_error" in one:
            yield Line(
                BAD, "disk", f"the run directory can't be written: {one['disk_error']}{_at(one, facts)}",
                "--output-dir somewhere that is yours and is there; see the mount and its rights",
            )  # fmt: skip
        free = (one["disk"] or {"free": 0})["free"]
        status = BAD if free < _GIB else WARN if free < 10 * _GIB else GOOD
        speed = one.get("disk_speed")
        text = f"{words.size(free)} free" + (f", written and synced at {words.size(speed)}/s" if speed else "")
        yield Line(
            status, "disk", text + _at(one, facts), "" if status == GOOD else "free space, or --output-dir elsewhere"
        )
    if len(machines) > 1:
        shared = all(one.get("sees_run_directory") for one in machines)
        do = "" if shared else "checkpoint.format: full works so; sharded needs one folder that all machines share"
        found = "all machines see one run directory" if shared else "machines do not share the run directory"
        yield Line(GOOD if shared else WARN, "shared folder", found, do)


CHEAP: tuple[Callable[[Facts], Iterator[Line]], ...] = (equality, variables, gpus)
ALL = (*CHEAP, topology, limits, disk)


def _values(facts: Facts, name: str) -> dict[int, str]:
    return {one["rank"]: one["variables"].get(name, "unset") for one in facts}


def _who(groups: dict[str, list[int]], facts: Facts) -> str:
    hosts = {one["rank"]: one["host"] for one in facts}
    return ", ".join(f"{value} on rank {_ranks(ranks)} ({hosts[ranks[0]]})" for value, ranks in groups.items())


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown} and {len(ranks) - 4} more"


def _on_all(facts: Facts) -> str:
    return "" if len(facts) == 1 else f" on all {len(facts)} ranks"


def _at(one: dict[str, Any], facts: Facts) -> str:
    return f" on {one['host']} (rank {one['rank']})" if len({other["machine"] for other in facts}) > 1 else ""


def _unlimited(value: int) -> float:
    return float("inf") if value == -1 else value
