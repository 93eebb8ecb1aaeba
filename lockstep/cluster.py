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
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep import groups
from lockstep.config import DistributedConfig
from lockstep.cores import threads_per_rank
from lockstep.environment import RankFacts, check_numbers, rank_facts, settle
from lockstep.errors import UsageError
from lockstep.existing_group import facts_of_existing_group, facts_over_store
from lockstep.heap import keep_freed_memory
from lockstep.heartbeat import of_this_rank, share_calls, stop_sharing_calls
from lockstep.rendezvous import choose_interface, rendezvous
from lockstep.scratch import remove, scratch_folder

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

    def check(self) -> None:
        """Refuse to train where the script has made another process group since: each rank would train on its own.

        Raises:
            UsageError: with what to change in the script.
        """
        if not dist.is_initialized():
            return
        now, then = (dist.get_rank(), dist.get_world_size()), (self.facts.rank, self.facts.world_size)
        if now != then:
            raise UsageError(
                f"this process was rank {then[0]} of {then[1]} when the model was placed, and is rank {now[0]} of "
                f"{now[1]} now",
                why="the process group was made afterwards",
                fix="call init_process_group before lockstep.setup(), Trainer(…) and lockstep.place(…), or not at all:"
                " Lockstep makes the group",
            )


_current: Cluster | None = None
# The process group that `_current` is about; None: there was none. A strong reference would keep a group that the
# script has destroyed, and its port, for the rest of the process.
_world: "weakref.ref[Any] | None" = None
_group_is_ours = False
_calls: Path | None = None  # the folder that this rank has made for those of its machine


def setup(distributed: DistributedConfig | None = None) -> Cluster:
    """Choose this rank's device and join the other ranks. A second call returns what the first one made.

    A process that nobody launched is rank 0 of 1 and needs no process group. A process group that exists already, made
    by the script itself, is the world: all ranks call `setup` then, which may exchange where each of them is.

    Raises:
        UsageError: the device or the backend isn't there, an address is missing, a port is in use, the process group
            that exists is another than the environment or the config says.
        RunError: the other ranks did not come within the timeout.
    """
    global _current, _world, _group_is_ours
    if _current is not None and _is_same_world():
        return _current
    _current, _group_is_ours = None, False  # the script has made or left a group since
    _stop_comparing_calls()
    settle(None)
    config = distributed if distributed is not None else DistributedConfig()
    os.environ.update(environment(config))
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # read by torch once, at its import
    check_numbers(os.environ)
    exists = dist.is_initialized()
    facts, gpu = facts_of_existing_group() if exists else (rank_facts(), None)
    store = None
    if not exists and facts.launcher == "torchrun" and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        store = _meet(config, facts)
        facts = facts_over_store(facts, store)
    if exists:
        group = weakref.ref(dist.group.WORLD)
        settle(facts, lambda: dist.group.WORLD is not None and group() is dist.group.WORLD)
    elif store is not None:
        settle(facts)
    if gpu is None or config.device == "cpu":
        device = _choose_device(config.device, facts)
    else:
        device = torch.device("cuda", gpu)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before anything else touches a GPU, or every rank makes a context on GPU 0
    else:
        keep_freed_memory()
    _share_out_threads(facts)
    backend = _existing_backend(config, device) if exists else _choose_backend(config.backend, device)
    _warn_of_nccl_timeout(facts)
    if facts.launcher == "none":
        backend = "none"
    elif exists:
        atexit.register(_leave_at_exit)  # its threads are waited for; it stays the script's
    else:
        _join(config, facts, device, backend, store)
    _world = None if dist.group.WORLD is None else weakref.ref(dist.group.WORLD)
    _current = Cluster(facts, device, backend)
    _compare_calls(facts)
    return _current


def _is_same_world() -> bool:
    group = dist.group.WORLD
    return group is None if _world is None else group is not None and _world() is group


def cleanup() -> None:
    """Leave the process group that `setup` made; harmless where there is none."""
    global _current, _world, _group_is_ours
    _stop_comparing_calls()
    groups.leave_world(destroy=_group_is_ours)
    _current, _world, _group_is_ours = None, None, False
    settle(None)


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


def _existing_backend(config: DistributedConfig, device: torch.device) -> str:
    """Return the backend of the process group that the script made.

    Raises:
        UsageError: the config asks for another one, or the group does not serve the device.
    """
    backend, serves = dist.get_backend(), dist.get_backend_config()
    if config.backend not in ("auto", backend):
        raise UsageError(
            f"distributed.backend is {config.backend}, but the process group that exists has {backend}",
            fix=f'write init_process_group("{config.backend}", …) in the script, or distributed.backend: auto',
        )
    if f"{device.type}:" not in serves:
        raise UsageError(
            f"the process group that exists has backend {backend}, which does not serve the device {device.type}",
            where="init_process_group, in the script",
            fix='write init_process_group("cpu:gloo,cuda:nccl", …), or leave the call out: Lockstep makes the group',
        )
    return backend


def _warn_of_nccl_timeout(facts: RankFacts) -> None:
    names = sorted(name for name in os.environ if name.startswith("NCCL_TIMEOUT"))
    if names and facts.is_main:
        _log.warning(
            "warning: %s does nothing in torch; the timeout is distributed.timeout_seconds in the config",
            ", ".join(names),
        )


# ---- the process group ----


def _meet(config: DistributedConfig, facts: RankFacts) -> Store:
    return rendezvous(config, facts, datetime.timedelta(seconds=config.timeout_seconds))


def _join(config: DistributedConfig, facts: RankFacts, device: torch.device, backend: str, store: Store | None) -> None:
    global _group_is_ours
    timeout = datetime.timedelta(seconds=config.timeout_seconds)
    store = _meet(config, facts) if store is None else store
    choose_interface(config, facts)
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


# ---- calls that all ranks make ----


def _compare_calls(facts: RankFacts) -> None:
    """Give the ranks of each machine a folder where they compare their calls, if no launcher has made one.

    All ranks call it. The folder is the first rank's of the machine.
    """
    global _calls
    if facts.world_size == 1 or of_this_rank().folder is not None or dist.get_backend() == "fake":
        return
    if facts.local_rank == 0 and facts.local_world_size > 1:
        with suppress(OSError):  # no disk has room for it: calls are not compared
            _calls = scratch_folder("calls")
    told: list[Any] = [None] * facts.world_size
    dist.all_gather_object(told, (facts.node_rank, None if _calls is None else str(_calls)))
    folder = next((Path(path) for node, path in told if node == facts.node_rank and path is not None), None)
    if folder is not None and folder.is_dir():
        share_calls(folder, facts.rank, facts.local_world_size)


def _stop_comparing_calls() -> None:
    global _calls
    stop_sharing_calls()
    if _calls is not None:
        remove(_calls)  # what the others have opened stays theirs
        _calls = None


def _leave_at_exit() -> None:
    with suppress(Exception):  # the interpreter is going down and peers may be gone: nobody can be told any more
        cleanup()
