"""Who am I, who else is there: the device of this rank, and the process group that joins the ranks.

`setup()` does, in this order: environment variables, the device from the *local* rank, the number of CPU threads, the
rendezvous, the process group. The rendezvous is Lockstep's rather than that of `init_process_group(init_method=…)`, so
that one machine needs no MASTER_ADDR, a restarted run never reads the keys of the attempt before it, and a port in use
is one clear message.
"""

import atexit
import datetime
import logging
import os
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep import groups
from lockstep.config import DistributedConfig
from lockstep.cores import threads_per_rank
from lockstep.environment import RankFacts, rank_facts
from lockstep.errors import UsageError
from lockstep.heap import keep_freed_memory
from lockstep.rendezvous import rendezvous

_log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class Cluster:
    """This process's place among the ranks.

    Attributes:
        facts: rank, local rank, world size, node, and who launched it.
        device: where this rank's tensors live.
        backend: `gloo`, `nccl` or `mpi`, or `none` where no process group was needed.
    """

    facts: RankFacts
    device: torch.device
    backend: str


_current: Cluster | None = None
_group_is_ours = False


def setup(distributed: DistributedConfig | None = None) -> Cluster:
    """Choose this rank's device and join the other ranks. A second call returns what the first one made.

    A process that nobody launched is rank 0 of 1 and needs no process group. A process group that exists already is
    used as it is.

    Raises:
        UsageError: the device or the backend isn't there, an address is missing, a port is in use.
        RunError: the other ranks did not come within the timeout.
    """
    global _current
    if _current is not None:
        return _current
    config = distributed if distributed is not None else DistributedConfig()
    os.environ.update(environment(config))
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # read by torch once, at its import
    facts = rank_facts()
    device = _choose_device(config.device, facts)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before anything else touches a GPU, or every rank makes a context on GPU 0
    else:
        keep_freed_memory()
    _share_out_threads(facts)
    backend = _choose_backend(config.backend, device)
    if facts.launcher == "none" and not dist.is_initialized():
        backend = "none"
    else:
        _warn_of_nccl_timeout(facts)
        _join(config, facts, device, backend)
    _current = Cluster(facts, device, backend)
    return _current


def cleanup() -> None:
    """Leave the process group that `setup` made; harmless where there is none."""
    global _current, _group_is_ours
    groups.forget()  # those that live on into the interpreter's own end take it down with them
    if _group_is_ours and dist.is_initialized():
        dist.destroy_process_group()
    _current, _group_is_ours = None, False


def environment(config: DistributedConfig) -> dict[str, str]:
    """The environment variables that a config asks for on every rank: the debug switches and `distributed.env`."""
    switches: dict[str, dict[str, str]] = {
        "none": {},
        "info": {"TORCH_DISTRIBUTED_DEBUG": "INFO", "NCCL_DEBUG": "WARN"},
        "detail": {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "NCCL_DEBUG": "INFO", "TORCH_CPP_LOG_LEVEL": "INFO"},
    }
    return switches[config.debug] | {name: str(value) for name, value in config.env.items()}


# ---- device, threads, backend ----


def _choose_device(wanted: str, facts: RankFacts) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UsageError(
            "distributed.device is cuda, but torch sees no GPU here",
            why="CUDA_VISIBLE_DEVICES is empty, the driver is missing, or this torch is a CPU build"
            f" (torch {torch.__version__})",
            fix="set distributed.device: cpu, or run where a GPU is",
        )
    count = torch.cuda.device_count()
    if facts.launcher == "srun" and count == 1:
        return torch.device("cuda", 0)  # srun --gpus-per-task gives each rank a GPU that it sees as number 0
    if facts.local_rank >= count:
        raise UsageError(
            f"local rank {facts.local_rank} has no GPU of its own: {facts.local_world_size} ranks on this machine, "
            f"{count} GPU{'s' * (count != 1)} visible",
            fix=f"--nproc-per-node {count}, or distributed.device: cpu",
        )
    return torch.device("cuda", facts.local_rank)


def _share_out_threads(facts: RankFacts) -> None:
    """Give each rank its share of the cores: ranks with a thread for every core each slow one another down."""
    if "OMP_NUM_THREADS" not in os.environ and facts.local_world_size > 1:
        torch.set_num_threads(threads_per_rank(facts.local_world_size))


def _choose_backend(wanted: str, device: torch.device) -> str:
    if wanted == "mpi" and not dist.is_mpi_available():
        raise UsageError(
            "distributed.backend is mpi, but this torch was built without MPI",
            why="the wheels of torch never have it; it needs a torch compiled where MPI is installed",
            fix="distributed.backend: auto (nccl on GPUs, gloo on CPUs); mpirun works as a launcher with these",
        )
    if wanted == "nccl" and device.type == "cpu":
        raise UsageError("distributed.backend is nccl, but the device is cpu", fix="distributed.backend: auto")
    if wanted != "auto":
        return wanted
    return "nccl" if device.type == "cuda" else "gloo"


def _warn_of_nccl_timeout(facts: RankFacts) -> None:
    names = sorted(name for name in os.environ if name.startswith("NCCL_TIMEOUT"))
    if names and facts.is_main:
        _log.warning(
            "warning: %s does nothing in torch; the timeout is distributed.timeout_seconds in the config",
            ", ".join(names),
        )


# ---- the process group ----


def _join(config: DistributedConfig, facts: RankFacts, device: torch.device, backend: str) -> None:
    global _group_is_ours
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=config.timeout_seconds)
    store = rendezvous(config, facts, timeout)
    # gloo beside nccl serves tensors that live in the host's memory (checkpoints, pickled objects).
    both = "cpu:gloo,cuda:nccl" if backend == "nccl" and config.backend == "auto" else backend
    dist.init_process_group(
        both,
        store=store,
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" and "nccl" in both else None,
    )
    _group_is_ours = True
    atexit.register(_leave_at_exit)


def _leave_at_exit() -> None:
    with suppress(Exception):  # the interpreter is going down and peers may be gone: nobody can be told any more
        cleanup()
