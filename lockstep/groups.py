"""Creates process groups once for each purpose and shares them in this process.

A gloo group keeps threads that wake up many times a second for the rest of the process, even when the group is no
longer used. A process that places many models (a test, a notebook, `lockstep verify`) would soon have too many.
"""

import time
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_GLOO_WORKER = "pt_gloo_runloop"  # torch's name for the threads of a gloo group's collectives
_SETTLE_SECONDS = 5.0  # time for threads of a busy machine to run

_made: dict[Hashable, Any] = {}
_world: Any = None  # the world in which they were created


def once(purpose: Hashable, make: Callable[[], T]) -> T:
    """Return the result of `make` for this purpose, created again only for another world.

    Args:
        purpose: names the use and the ranks. Every rank asks for the same purposes in the same order.
        make: creates groups, or a mesh of them; every rank calls it together.
    """
    global _world
    if _world is not dist.group.WORLD:
        _made.clear()
        _world = dist.group.WORLD
    if purpose not in _made:
        _made[purpose] = make()
    return _made[purpose]  # type: ignore[no-any-return]


def object_device(device: torch.device) -> torch.device:
    """Return the device for small messages between hosts: the CPU, if the process group supports it beside `device`."""
    config = dist.get_backend_config()
    return torch.device("cpu") if "cpu:" in config or "gloo" in config else device


def forget() -> None:
    """Drop all groups, before the world is left."""
    global _world
    _made.clear()
    _world = None


def leave_world(*, destroy: bool) -> None:
    """Leave the process group, and wait until its threads hold no Python objects.

    A collective ends for its caller slightly before it ends for the thread that ran it: that thread still has to
    release
    the tensors, for which it needs Python. If the interpreter ends first, Python ends the thread in the middle of a C++
    destructor, and the process dies with "terminate called without an active exception" after its work was done
    (pytorch/pytorch#190489). The threads end with the last reference to the group, which a user's model may hold until
    after the interpreter's end; idle threads do no harm.

    Args:
        destroy: whether Lockstep created the group and destroys it; False: it is the user's, and stays.
    """
    forget()
    if dist.is_initialized() and destroy:
        dist.destroy_process_group()
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
                said = (thread / "status").read_text()
                fields = dict(line.split(":", 1) for line in said.splitlines() if ":" in line)
                state, switches = fields["State"].split()[0], fields["voluntary_ctxt_switches"].strip()
                found[thread.name] = switches, state != "S"
        except OSError:
            continue  # it has ended
    return found
