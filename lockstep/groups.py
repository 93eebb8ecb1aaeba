"""Process groups, made once for each purpose and shared by all that follow in this process.

A group of gloo's keeps threads, which wake up many times a second for as long as the process lives, whatever becomes of
what used the group. A process that places one model after the other (a test, a notebook, `lockstep verify`) would soon
do little else.
"""

import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_GLOO_WORKER = "pt_gloo_runloop"  # the name that torch gives the threads that run a gloo group's collectives
_SETTLE_SECONDS = 5.0  # for threads of a busy machine to be given a core

_made: dict[Hashable, Any] = {}
_world: Any = None  # in which they were made


def once(purpose: Hashable, make: Callable[[], T]) -> T:
    """What `make` makes for this purpose, made anew only when the world is another one.

    Args:
        purpose: names the use and the ranks. Every rank asks for the same purposes in the same order.
        make: makes groups, or a mesh of them; every rank calls it together.
    """
    global _world
    if _world is not dist.group.WORLD:
        _made.clear()
        _world = dist.group.WORLD
    if purpose not in _made:
        _made[purpose] = make()
    return _made[purpose]  # type: ignore[no-any-return]


def object_device(device: torch.device) -> torch.device:
    """Where small messages between hosts are kept: the CPU, if the process group serves it beside `device`."""
    config = dist.get_backend_config()
    return torch.device("cpu") if "cpu:" in config or "gloo" in config else device


def forget() -> None:
    """Let go of all groups, before the world is left."""
    global _world
    _made.clear()
    _world = None


def leave_world(*, destroy: bool) -> None:
    """Leave the process group, and wait until its threads hold nothing of Python's any more.

    A collective is over for its caller a moment before it is over for the thread that ran it: that thread still has to
    let go of the tensors, for which it needs Python. If the interpreter ends first, Python ends the thread instead, in
    the middle of a C++ destructor, and the process dies with "terminate called without an active exception", after its
    work was done (pytorch/pytorch#190489). The threads themselves end with the last reference to the group, which a
    model of the user's may hold beyond the interpreter's end; idle, they do no harm.

    Args:
        destroy: whether the group is Lockstep's to destroy; False: the user's, which stays.
    """
    forget()
    if dist.is_initialized() and destroy:
        dist.destroy_process_group()
    deadline = time.monotonic() + _SETTLE_SECONDS
    before = _work_of_threads()
    while time.monotonic() < deadline:
        time.sleep(0.001)  # lets go of the interpreter's lock, for which such a thread waits
        now = _work_of_threads()
        if now == before and not any(running for _, running in now.values()):
            return
        before = now


def _work_of_threads() -> dict[str, tuple[str, bool]]:
    """How often each thread of gloo's has begun to wait, and whether it runs (Linux)."""
    found = {}
    for thread in Path("/proc/self/task").glob("*"):
        try:
            if (thread / "comm").read_text().strip() == _GLOO_WORKER:
                said = (thread / "status").read_text()
                fields = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
                state, switches = fields["State"].split()[0], fields["voluntary_ctxt_switches"].strip()
                found[thread.name] = switches, state != "S"
        except OSError:
            continue  # it has ended
    return found
