"""Gives a rank its number, sums over all ranks, and process groups.

Groups are created once for each purpose.

A gloo group keeps threads for the rest of the process, even when the group is no longer used: a
process that places many models would soon have too many.

Tests: tests/process_group/test_cluster.py, tests/process_group/test_existing_group.py
"""

import datetime
import os
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist

from lockstep.errors import UsageError
from lockstep.heartbeat.writer import called_by_all_ranks
from lockstep.machine import accelerator
from lockstep.machine.environment import facts_for_group, rank_facts
from lockstep.torch_compat.mesh_caches import forget_meshes

ReduceOp = Literal["mean", "sum", "max", "min"]
_OPERATIONS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def rank() -> int:
    """Return this process's rank, 0 when it runs alone."""
    return dist.get_rank() if dist.is_initialized() else rank_facts().rank


def world_size() -> int:
    """Return the number of ranks, 1 when this process runs alone."""
    return dist.get_world_size() if dist.is_initialized() else rank_facts().world_size


def local_rank() -> int:
    """Return this process's index on its machine.

    Raises:
        UsageError: the script created the process group, and the index is unknown before
            `lockstep.setup()`.
    """
    facts = rank_facts()
    if not dist.is_initialized() or facts.world_size == dist.get_world_size():
        return facts.local_rank
    complete, local = facts_for_group(dist.get_rank(), dist.get_world_size(), os.environ)
    if local is not None:
        return local
    if complete is not None:
        return complete.local_rank
    what = "the local rank is not known yet in a process group that the script made"
    why = "LOCAL_RANK is not set; lockstep.setup() works it out"
    fix = "call lockstep.setup() on all ranks, after init_process_group"
    raise UsageError(what, why=why, fix=fix)


def is_main_process() -> bool:
    """Return whether this is rank 0."""
    return rank() == 0


@called_by_all_ranks
def barrier() -> None:
    """Wait until every rank is here. All ranks must call it."""
    if _joined():
        dist.barrier()


@overload
def all_reduce(value: torch.Tensor, op: ReduceOp = ...) -> torch.Tensor: ...
@overload
def all_reduce(value: float, op: ReduceOp = ...) -> float: ...
@called_by_all_ranks
def all_reduce(value: torch.Tensor | float, op: ReduceOp = "mean") -> torch.Tensor | float:
    """Reduce `value` over all ranks and return the result on each of them. All ranks must call it.

    Args:
        value: a number, or a tensor of the same shape and dtype on every rank (not changed).

    Returns:
        a float for "mean" of numbers, else a number of the same kind; for a tensor a new one of its
        shape and device.

    Raises:
        UsageError: `op` is something else, or "mean" is used with an integer tensor.
    """
    if op not in _OPERATIONS:
        raise UsageError(
            f"all_reduce can't do {op!r}", fix=f"choose one of {', '.join(_OPERATIONS)}"
        )
    tensor = value
    if not isinstance(tensor, torch.Tensor):
        integral = isinstance(value, int) and op != "mean"
        tensor = torch.tensor(
            value, dtype=torch.int64 if integral else torch.float64, device=device_of_numbers()
        )
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        what = f"the mean of a tensor of {tensor.dtype} isn't of that dtype"
        raise UsageError(what, where="all_reduce", fix="pass value.float()")
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    if _joined():
        dist.all_reduce(result, _OPERATIONS[op])
        if op == "mean":
            result /= dist.get_world_size()
    return result if isinstance(value, torch.Tensor) else result.item()


def device_of_numbers() -> torch.device:
    """Return the device for numbers that ranks exchange.

    It is the CPU if the group supports it, else the rank's GPU.
    """
    if not dist.is_initialized() or "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    # `distributed.backend: nccl` serves cuda alone
    kind = dist.get_backend_config().partition(":")[0]
    return torch.device(kind, accelerator.current_index(kind))


def _joined() -> bool:
    if dist.is_initialized():
        return True
    if rank_facts().world_size > 1:
        raise UsageError(
            "this rank has not joined the others yet", fix="call lockstep.setup() first"
        )
    return False


T = TypeVar("T")

_GLOO_WORKER = "pt_gloo_runloop"  # torch's name for the threads of a gloo group's collectives
_SETTLE_SECONDS = 5.0  # time for threads of a busy machine to run

# Held until this rank leaves the world or enters another. Where DDP's reducer, which is C++, is the
# last to hold a group, it ends the group under Python's lock, and waits for the group's thread,
# which may wait for the lock (torch 2.13).
_made: dict[Hashable, Any] = {}
_world: Any = None  # the world in which they were created
_timeout: datetime.timedelta | None = None  # of their collectives; None: torch's default


def create_once(purpose: Hashable, make: Callable[[], T]) -> T:
    """Return the result of `make` (groups, or a mesh of them), which is called once for a purpose.

    The purpose names the use and the ranks. Every rank asks for the same purposes in the same
    order. For another world all is made again.
    """
    global _world
    if _world is not dist.group.WORLD:
        _made.clear()
        _world = dist.group.WORLD
    if purpose not in _made:
        _made[purpose] = make()
    return _made[purpose]  # type: ignore[no-any-return]


def new_group(ranks: Sequence[int] | None, **more: Any) -> Any:
    """Create a group of ranks, None for all, with the timeout of this run.

    Left alone, torch gives it half an hour on gloo, whatever the timeout of the world is. `more`
    are arguments of `dist.new_group`.
    """
    return dist.new_group(None if ranks is None else list(ranks), timeout=_timeout, **more)


def set_timeout(seconds: float) -> None:
    """Set how long a collective of the groups that follow may take."""
    global _timeout
    _timeout = datetime.timedelta(seconds=seconds)


def create_group(purpose: str, members: Iterable[Sequence[int]]) -> dist.ProcessGroup | None:
    """Create the groups of these members, each once; return the one that this rank is in.

    Every rank calls it.
    """
    mine = None
    for ranks in members:
        made = create_once((purpose, *ranks), partial(new_group, list(ranks)))
        if dist.get_rank() in ranks:
            mine = made
    return mine


def object_device(device: torch.device) -> torch.device:
    """Return the device for small messages between hosts.

    It is the CPU, if the process group supports it beside `device`.
    """
    config = dist.get_backend_config()
    return torch.device("cpu") if "cpu:" in config or "gloo" in config else device


def message_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return where tensors of `device` lie while one rank sends them to another.

    It is the host's memory under gloo: given memory of a GPU, its sends end the process.
    """
    serves = dist.get_backend_config(group).split(",")
    return torch.device("cpu") if f"{device.type}:gloo" in serves else device


def leave_world(*, destroy: bool) -> None:
    """Leave the process group, `destroy` it if wanted, and wait until its threads are done.

    The thread that ran a collective releases its tensors slightly later, for which it needs Python.
    If the interpreter ends first, the process dies with "terminate called without an active
    exception" (pytorch/pytorch#190489); if the model goes first, and with it the last holder of the
    group, Python and the thread wait for each other.
    """
    global _world
    _made.clear()
    _world = None
    if dist.is_initialized() and destroy:
        dist.destroy_process_group()
        forget_meshes()
    deadline = time.monotonic() + _SETTLE_SECONDS
    before = _work_of_threads()
    while time.monotonic() < deadline:
        time.sleep(0.001)  # releases the interpreter's lock, for which such a thread waits
        now = _work_of_threads()
        if now == before and not any(running for _, running in now.values()):
            return
        before = now


def _work_of_threads() -> dict[str, tuple[str, bool]]:
    """Return how often each gloo thread has begun to wait, and whether it runs (Linux)."""
    found = {}
    for thread in Path("/proc/self/task").glob("*"):
        try:
            if (thread / "comm").read_text().strip() == _GLOO_WORKER:
                status = (thread / "status").read_text()
                fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
                state = fields["State"].split()[0]
                switches = fields["voluntary_ctxt_switches"].strip()
                found[thread.name] = switches, state != "S"
        except OSError:
            continue  # it has ended
    return found
