"""Chooses this rank's device, and joins the ranks in a process group.

It has its own rendezvous instead of `init_process_group(init_method=…)`: one machine needs no
MASTER_ADDR, a restarted run never reads keys of the attempt before it, and a port in use gives a
clear message.

Tests: tests/process_group/test_cluster.py, tests/test_heap.py
"""

import atexit
import ctypes
import datetime
import logging
import os
import sys
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from lockstep.config import DistributedConfig
from lockstep.errors import UsageError
from lockstep.heartbeat.writer import own_heartbeat, share_calls, stop_sharing_calls
from lockstep.machine import accelerator
from lockstep.machine.cores import threads_per_rank
from lockstep.machine.environment import RankFacts, check_numbers, rank_facts, set_rank_facts
from lockstep.machine.scratch import remove, scratch_folder
from lockstep.process_group import collectives
from lockstep.process_group.caught_errors import watch_caught_errors
from lockstep.process_group.rendezvous import (
    StoredDepartures,
    choose_interface,
    facts_of_existing_group,
    facts_over_store,
    rendezvous,
)
from lockstep.torch_compat.default_store import default_store
from lockstep.torch_compat.group_options import checks_collectives, timeout_of

_log = logging.getLogger("lockstep")


@dataclass(frozen=True)
class Cluster:
    """This process's place among the ranks."""

    facts: RankFacts
    device: torch.device
    backend: str  # `gloo`, `nccl`, `xccl`, `mpi` …; `none` without a process group

    def check(self) -> None:
        """Raise a UsageError if the script has since created another group.

        Each rank would train on its own.
        """
        if not dist.is_initialized():
            return
        now = (dist.get_rank(), dist.get_world_size())
        then = (self.facts.rank, self.facts.world_size)
        if now != then:
            what = (
                f"this process was rank {then[0]} of {then[1]} when the model was placed, and is"
                f" rank {now[0]} of {now[1]} now"
            )
            fix = (
                "call init_process_group before lockstep.setup(), Trainer(…) and"
                " lockstep.place(…), or not at all: Lockstep makes the group"
            )
            raise UsageError(what, why="the process group was made afterwards", fix=fix)


_current: Cluster | None = None
# The process group of `_current`; None: there was none. A strong reference would keep a group that
# the script has destroyed, and its port, for the rest of the process.
_world: "weakref.ref[Any] | None" = None
_group_is_ours = False
_timeout = 0.0  # of its collectives
_worlds = 0  # number of worlds of several machines that this process was in
# the folder that this rank has created for the ranks of its machine
_calls_folder: Path | None = None


def setup(distributed: DistributedConfig | None = None) -> Cluster:
    """Choose this rank's device and join the other ranks. Later calls return the same cluster.

    A process without a launcher is rank 0 of 1 and needs no process group. If the script has
    created a process group, that group is the world: then all ranks call `setup`, since they may
    exchange their places.

    Raises:
        UsageError: a device, a backend or an address is missing, a port is in use, or an existing
            group differs.
        RunError: the other ranks did not come within the timeout.
    """
    global _current, _world, _group_is_ours, _timeout
    group = dist.group.WORLD
    if _current is not None and _is_same_world(group):
        if distributed is not None:
            _require_same(distributed, _current)
        return _current

    # The first call, or the script has since created or destroyed a group.
    _current = None
    _group_is_ours = False
    _stop_sharing()
    set_rank_facts(None)
    config = distributed if distributed is not None else DistributedConfig()
    os.environ.update(environment(config))
    dist.set_debug_level_from_env()  # type: ignore[attr-defined]  # read by torch once, at its import
    check_numbers(os.environ)

    facts, gpu, store = _find_place(config)
    device = _take_device(config, facts, gpu)
    backend = _enter_group(config, facts, device, store)
    _world = None if dist.group.WORLD is None else weakref.ref(dist.group.WORLD)
    here = Cluster(facts, device, backend)
    _timeout = _compare_with_group(config, group, here)
    _current = here
    collectives.set_timeout(_timeout)
    _share_calls(facts)
    return _current


def _is_same_world(group: Any) -> bool:
    """Return whether `group`, the default one, is that of the last `setup`; None: there is none."""
    if _world is None:
        return group is None
    return group is not None and _world() is group


def _find_place(config: DistributedConfig) -> tuple[RankFacts, str | None, Store | None]:
    """Return this process's place among the ranks.

    Returns:
        (the place; the GPU that a script has chosen for its own group, or None; the store over
        which the ranks of a launcher that does not number them by machine have found their places)
    """
    group = dist.group.WORLD
    if dist.is_initialized():
        facts, gpu = facts_of_existing_group()
        theirs = weakref.ref(group)
        set_rank_facts(facts, lambda: dist.group.WORLD is not None and theirs() is dist.group.WORLD)
        return facts, gpu, None
    facts = rank_facts()
    is_numbered = {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys()
    if facts.launcher != "torchrun" or is_numbered:
        return facts, None, None
    store = rendezvous(config, facts, datetime.timedelta(seconds=config.timeout_seconds))
    facts = facts_over_store(facts, store)
    set_rank_facts(facts)
    return facts, None, store


def _take_device(config: DistributedConfig, facts: RankFacts, gpu: str | None) -> torch.device:
    """Return this rank's device, selected, with its share of the machine's cores.

    `gpu`: the one that the script has chosen.
    """
    if gpu is None or config.device == "cpu":
        device = _choose_device(config.device, facts)
    else:
        device = torch.device(gpu)
    # before anything else uses a GPU, or every rank creates a context on GPU 0
    accelerator.select(device)
    if device.type == "cpu":
        keep_freed_memory()
    if "OMP_NUM_THREADS" not in os.environ and facts.local_world_size > 1:
        # more than cores make all ranks slower
        torch.set_num_threads(threads_per_rank(facts.local_world_size))
    return device


def _enter_group(
    config: DistributedConfig, facts: RankFacts, device: torch.device, store: Store | None
) -> str:
    """Join the other ranks, or stay in the script's group; return its backend, `none` if alone."""
    alone = facts.launcher == "none"
    exists = dist.is_initialized()
    if exists:
        backend = _existing_backend(config, device)
    else:
        backend = _choose_backend(config.backend, device, alone=alone)
    _warn_of_nccl_timeout(facts)
    if alone:
        return "none"
    if exists:
        # waits for the group's threads; the group stays the script's
        atexit.register(_leave_at_exit)
    else:
        _join(config, facts, device, backend, store)
    return backend


def _require_same(config: DistributedConfig, cluster: Cluster) -> None:
    """Reject settings of a later trainer that this process can't follow.

    It has its device and its group since its first one.
    """
    has_group = cluster.backend != "none"
    usual_timeout = DistributedConfig.model_fields["timeout_seconds"].default
    if not has_group:
        _choose_backend(config.backend, cluster.device, alone=True)
    variables = {
        name: value for name, value in environment(config).items() if os.environ.get(name) != value
    }
    differing = {
        "device": config.device not in ("auto", cluster.device.type),
        "backend": has_group and config.backend not in ("auto", cluster.backend),
        "timeout_seconds": (has_group and config.timeout_seconds not in (usual_timeout, _timeout)),
        "debug": config.debug != "none" and bool(variables.keys() - config.env.keys()),
        "env": bool(variables.keys() & config.env.keys()),
    }
    if names := [name for name, differs in differing.items() if differs]:
        what = (
            f"distributed.{names[0]} is {getattr(config, names[0])}, and this process runs"
            " otherwise since its first lockstep.setup(), Trainer(…) or lockstep.place(…)"
        )
        fix = f"write {names[0]} there, too; or call lockstep.cleanup() between the two"
        raise UsageError(what, where=", ".join(f"distributed.{name}" for name in names), fix=fix)


def cleanup() -> None:
    """Leave the process group that `setup` created; without one, do nothing."""
    global _current, _world, _group_is_ours
    if _current is not None and not _is_failing():
        own_heartbeat().left()
    _stop_sharing()
    collectives.leave_world(destroy=_group_is_ours)
    _current = None
    _world = None
    _group_is_ours = False
    set_rank_facts(None)


def count_worlds_anew() -> None:
    """Forget how many worlds of several machines this process was in.

    The next one has a store of its own, and ranks that enter it may have been in different numbers
    of them.
    """
    global _worlds
    _worlds = 0


def environment(config: DistributedConfig) -> dict[str, str]:
    """Return the environment variables that a config sets on every rank.

    They are debug switches, and those of `distributed.env`.
    """
    switches: dict[str, dict[str, str]] = {
        "none": {},
        "info": {"TORCH_DISTRIBUTED_DEBUG": "INFO", "NCCL_DEBUG": "WARN"},
        "detail": {
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
            "NCCL_DEBUG": "INFO",
            "TORCH_CPP_LOG_LEVEL": "INFO",
        },
    }
    return switches[config.debug] | {name: str(value) for name, value in config.env.items()}


def _choose_device(wanted: str, facts: RankFacts) -> torch.device:
    """Return this rank's device: the CPU, or the GPU of its local rank."""
    kind = accelerator.found() if wanted == "auto" else wanted
    if kind is None or kind == "cpu":
        return torch.device("cpu")
    _require_device(kind, facts)
    count = accelerator.count(kind)
    if facts.launcher == "srun" and count == 1:
        # srun --gpus-per-task gives each rank one GPU, which it sees as number 0
        return torch.device(kind, 0)
    if facts.local_rank >= count:
        what = (
            f"local rank {facts.local_rank} has no GPU of its own: {facts.local_world_size} ranks"
            f" on this machine, {count} GPU{'s' * (count != 1)} visible"
        )
        raise UsageError(what, fix=f"--nproc-per-node {count}, or distributed.device: cpu")
    return torch.device(kind, facts.local_rank)


def _require_device(kind: str, facts: RankFacts) -> None:
    """Raise a UsageError if torch can't use an accelerator of this kind here."""
    found = accelerator.found()
    if not accelerator.is_known(kind):
        what = f"distributed.device is {kind}, and torch knows no accelerator of that name"
        why = (
            "it is cuda (also for AMD's GPUs), xpu, mps, or a name that an installed package"
            " registers with torch"
        )
        raise UsageError(what, why=why, fix=f"write distributed.device: {found or 'cpu'}, or auto")
    if not accelerator.is_available(kind):
        what = f"distributed.device is {kind}, but torch sees no GPU here"
        what += f" of that type: it sees {found}" if found is not None else ""
        why = (
            "CUDA_VISIBLE_DEVICES is empty, the driver is missing, or this torch is a CPU build"
            f" (torch {torch.__version__})"
        )
        raise UsageError(
            what,
            why=why,
            fix=f"set distributed.device: {found or 'cpu'}, or run where such a GPU is",
        )
    if accelerator.one_process(kind) and facts.world_size > 1:
        what = f"distributed.device is {kind}, and there are {facts.world_size} ranks"
        why = f"torch has no process groups for tensors on {kind}; such a machine has one GPU"
        raise UsageError(
            what,
            why=why,
            fix="start one process: --nproc-per-node 1; or set distributed.device: cpu",
        )


def _choose_backend(wanted: str, device: torch.device, *, alone: bool = False) -> str:
    """Return the backend for a device; refuse one that this torch or the device lacks."""
    if wanted == "mpi" and not dist.is_mpi_available():
        why = "the wheels of torch never have it; it needs a torch compiled where MPI is installed"
        fix = (
            "distributed.backend: auto (nccl on GPUs, gloo on CPUs); mpirun works as a launcher"
            " with these"
        )
        raise UsageError(
            "distributed.backend is mpi, but this torch was built without MPI", why=why, fix=fix
        )
    if wanted in _DEVICE_OF and device.type != _DEVICE_OF[wanted]:
        what = f"distributed.backend is {wanted}, but the device is {device.type}"
        raise UsageError(what, fix="distributed.backend: auto")
    if alone:
        return "none"
    if wanted != "auto":
        return wanted
    try:
        return str(dist.get_default_backend_for_device(device.type))
    except ValueError:
        what = f"no backend of process groups is registered for the device {device.type}"
        why = (
            "the package that brings the device brings its collectives, too, and registers them"
            " with torch"
        )
        fix = "import that package before lockstep, or set distributed.device: cpu"
        raise UsageError(what, why=why, fix=fix) from None


_DEVICE_OF = {"nccl": "cuda", "xccl": "xpu"}


def _existing_backend(config: DistributedConfig, device: torch.device) -> str:
    """Return the backend of the script's process group.

    A UsageError if it is not the config's, or does not support the device.
    """
    backend = dist.get_backend()
    serves = dist.get_backend_config()
    if config.backend not in ("auto", backend):
        what = (
            f"distributed.backend is {config.backend}, but the process group that exists has"
            f" {backend}"
        )
        fix = (
            f'write init_process_group("{config.backend}", …) in the script, or'
            " distributed.backend: auto"
        )
        raise UsageError(what, fix=fix)
    if f"{device.type}:" not in serves:
        what = (
            f"the process group that exists has backend {backend}, which does not serve the device"
            f" {device.type}"
        )
        fix = (
            f'write init_process_group("{_beside_gloo(device, _choose_backend("auto", device))}",'
            " …), or leave the call out: Lockstep makes the group"
        )
        raise UsageError(what, where="init_process_group, in the script", fix=fix)
    return backend


def _compare_with_group(config: DistributedConfig, group: Any, cluster: Cluster) -> float:
    """Return the timeout for groups that are made beside the world.

    Settings can't change `group`, the script's, any more; None: the script has made none.

    Raises UsageError: `debug: detail` is asked for, and the script's group was made without it.
    """
    if group is None or cluster.facts.world_size == 1 or cluster.backend == "fake":
        return config.timeout_seconds
    if config.debug == "detail" and not checks_collectives(group, cluster.device):
        what = (
            "distributed.debug is detail, and the process group that the script has made checks no"
            " collectives"
        )
        why = "torch reads the switch when a group is made"
        fix = (
            "write torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL) before"
            " init_process_group, or leave that call out: Lockstep makes the group"
        )
        raise UsageError(what, where="distributed.debug", why=why, fix=fix)
    theirs = timeout_of(group, cluster.device)
    if "timeout_seconds" not in config.model_fields_set:
        return config.timeout_seconds if theirs is None else theirs
    asked = config.timeout_seconds
    if theirs not in (None, asked) and cluster.facts.is_main:
        _log.warning(
            "warning: distributed.timeout_seconds is %g, and collectives of the process group that"
            " the script has made end after %g s; write init_process_group(…,"
            " timeout=datetime.timedelta(seconds=%g)), or leave that call out: Lockstep makes the"
            " group",
            asked,
            theirs,
            asked,
        )
    return asked


def _warn_of_nccl_timeout(facts: RankFacts) -> None:
    names = sorted(name for name in os.environ if name.startswith("NCCL_TIMEOUT"))
    if names and facts.is_main:
        _log.warning(
            "warning: %s does nothing in torch; the timeout is distributed.timeout_seconds in the"
            " config",
            ", ".join(names),
        )


def _beside_gloo(device: torch.device, backend: str) -> str:
    """Return the backends for both devices.

    gloo is for tensors in host memory: checkpoints and pickled objects.
    """
    return (
        backend
        if device.type == "cpu" or backend == "gloo"
        else f"cpu:gloo,{device.type}:{backend}"
    )


def _join(
    config: DistributedConfig,
    facts: RankFacts,
    device: torch.device,
    backend: str,
    store: Store | None,
) -> None:
    """Join the process group; with `backend: auto` one that carries tensors on the CPU, too."""
    global _group_is_ours
    timeout = datetime.timedelta(seconds=config.timeout_seconds)
    store = rendezvous(config, facts, timeout) if store is None else store
    choose_interface(config, facts)
    both = _beside_gloo(device, backend) if config.backend == "auto" else backend
    # Binds the group to the device, so that the communicator starts at once; gloo can't.
    bound = device if backend in _DEVICE_OF else None
    dist.init_process_group(
        both,
        store=store,
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=timeout,
        device_id=bound,
    )
    _group_is_ours = True
    atexit.register(_leave_at_exit)


def _share_calls(facts: RankFacts) -> None:
    """Let the ranks of each machine compare their calls in a folder.

    All ranks call it. It does nothing if a launcher has created a folder.
    """
    global _calls_folder, _worlds
    if facts.world_size == 1 or dist.get_backend() == "fake":
        return
    if facts.world_size > facts.local_world_size:
        _worlds += 1
        own_heartbeat().tell_other_machines(
            StoredDepartures(default_store(), facts.rank, facts.world_size, _worlds)
        )
    if own_heartbeat().folder is not None:
        return
    if facts.local_rank == 0:
        with suppress(OSError):  # no space on disk: calls are not compared
            _calls_folder = scratch_folder("calls")
    folders: list[Any] = [None] * facts.world_size
    dist.all_gather_object(
        folders, (facts.node_rank, None if _calls_folder is None else str(_calls_folder))
    )
    folder = next(
        (Path(path) for node, path in folders if node == facts.node_rank and path is not None), None
    )
    if folder is not None and folder.is_dir():
        share_calls(folder, facts.rank, facts.local_world_size)
        watch_caught_errors(facts.world_size)
    # the first one to leave removes the folder: all have opened its files
    dist.all_gather_object(folders, None)
    own_heartbeat().see_others()


def _stop_sharing() -> None:
    global _calls_folder
    own_heartbeat().tell_other_machines(None)
    stop_sharing_calls()
    if _calls_folder is not None:
        remove(_calls_folder)  # the other ranks' open files stay valid
        _calls_folder = None


def _is_failing() -> bool:
    """Return whether an exception that nobody caught ends this process."""
    return getattr(sys, "last_type", None) is not None


def _leave_at_exit() -> None:
    # the interpreter is ending and peers may be gone: nobody can read a message
    with suppress(Exception):
        cleanup()


_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_MMAP_MAX = -4
_NEVER = -1
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Make this process keep the memory that it frees (man 3 mallopt); return whether it does.

    A step on a CPU requests the same sizes again and again. glibc returns freed memory to the
    system, which must map and clear each page on its next use: measured at 10 of 60 ms. Nothing
    changes if the environment has settings.
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")):
        return False
    if "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Older versions accept no threshold above 32 MiB, but can be told to map nothing.
    large = mallopt(_MMAP_THRESHOLD, _LARGEST) or mallopt(_MMAP_MAX, 0)
    return bool(large and mallopt(_TRIM_THRESHOLD, _NEVER))
