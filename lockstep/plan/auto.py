"""Resolves `strategy: auto` to the choice of `lockstep plan` for the started ranks.

Each rank chooses before it joins the others, from what is the same for all of them: the config, their number, and the
memory of a device like its own. Choices that change results (bf16 weights) are left to the user.
"""

from dataclasses import dataclass
from typing import Any

import psutil
import torch

from lockstep.config import Config
from lockstep.costs.hardware import LINKS, Gpu, GpuCluster, Link, known_gpu
from lockstep.environment import rank_facts
from lockstep.errors import UsageError
from lockstep.plan import GIB
from lockstep.plan.candidates import Candidate, candidates, evaluate_layout, model_size_of
from lockstep.plan.workload import workload_of
from lockstep.strategy import REPLICAS, SINGLE

_COMFORTABLE = 0.6  # fraction of a device's memory: replicas that need less are fastest
_LOOPBACK = Link("loopback", 1.0, 1.5e-3, "this machine's own network")


@dataclass(frozen=True)
class Choice:
    """A config with a named strategy, and one line with the reason."""

    config: Config
    reason: str


def resolve(config: Config) -> Config:
    """Return the config with a strategy; rank 0 prints it with the reason."""
    facts = rank_facts()
    choice = choose(config, facts.world_size, facts.local_world_size)
    if facts.rank == 0:
        print(f"lockstep: strategy auto: {choice.reason}", flush=True)
    return choice.config


def choose(config: Config, world_size: int, local_world_size: int, cluster: GpuCluster | None = None) -> Choice:
    """Choose a strategy for `world_size` ranks.

    Raises:
        UsageError: no layout fits.
    """
    if world_size == 1:
        return Choice(config.replaced({"distributed.strategy": SINGLE}), "single, there is one rank")
    cluster = cluster or _cluster_here(config, world_size, local_world_size)
    work = workload_of(config)
    facts = model_size_of(work, config)
    asked = {"training.gradient_checkpointing": config.training.gradient_checkpointing}
    shows = rank_facts().is_main
    replicas = evaluate_layout(work, config, cluster, {"distributed.strategy": REPLICAS, **asked}, facts)
    if replicas.fits and replicas.needed <= _COMFORTABLE * replicas.limit:
        why = f"{replicas.layout}: {_size(replicas)} of {replicas.limit / GIB:.1f} GiB a rank, nothing need be sharded"
        return Choice(config.replaced({"distributed.strategy": REPLICAS}), why)
    found = [c for c in candidates(work, config, cluster, low=False, pipelines=False, shows=shows) if c.fits]
    found = found or [c for c in candidates(work, config, cluster, low=False, shows=shows) if c.fits]
    if not found:
        raise UsageError(
            f"no layout of this model fits {world_size} ranks of {cluster.gpu.name}",
            where="distributed.strategy: auto",
            fix="`lockstep plan` says by how much; use more ranks or a smaller training.batch_size",
        )
    # The user's mode of checkpointing stays, if a layout fits with it.
    best = next((c for c in found if c.checkpointing == asked["training.gradient_checkpointing"]), found[0])
    return Choice(config.replaced(_named(best)), f"{best.name()}: {_why(best, replicas)}")


def _named(best: Candidate) -> dict[str, Any]:
    return {key: value for key, value in best.changes.items() if value is not None}


def _why(best: Candidate, replicas: Candidate) -> str:
    lacking = "" if replicas.fits else f"ddp needs {_size(replicas)} of {replicas.limit / GIB:.1f} GiB; "
    return f"{lacking}{_size(best)} a rank, the fastest that fits"


def _size(candidate: Candidate) -> str:
    if candidate.needed < GIB:
        return f"{candidate.needed / 2**20:.0f} MiB"
    return f"{candidate.needed / GIB:.1f} GiB"


def _cluster_here(config: Config, world_size: int, local_world_size: int) -> GpuCluster:
    per_node = max(1, local_world_size)
    if torch.cuda.is_available() and config.distributed.device != "cpu":
        facts = torch.cuda.get_device_properties(0)
        gpu = known_gpu(facts.name)
        if gpu is None:
            gpu = Gpu(facts.name, facts.total_memory / GIB, 100, 20, 1000, "PCIe 4", "this device; speeds are guessed")
        return GpuCluster(gpu, world_size, per_node, LINKS[gpu.inside], LINKS["InfiniBand HDR"])
    memory = psutil.virtual_memory().total / GIB / per_node
    cpu = Gpu("CPU", memory, 0.1, 0.1, 20, "loopback", "a rank's share of this machine's memory; speeds are guessed")
    return GpuCluster(cpu, world_size, per_node, _LOOPBACK, LINKS["Ethernet 1G"])
