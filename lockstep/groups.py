"""Process groups, made once for each purpose and shared by all that follow in this process.

A group of gloo's keeps threads, which wake up many times a second for as long as the process lives, whatever becomes of
what used the group. A process that places one model after the other (a test, a notebook, `lockstep verify`) would soon
do little else.
"""

import atexit
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

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


@atexit.register
def forget() -> None:
    """Let go of all groups: before the world is left, and before the interpreter ends."""
    global _world
    _made.clear()
    _world = None
