"""`torch.distributed.Work.wait`, replaced on the class.

A wait for other ranks is told before and after.

Public torch: no hook around a wait; a profiler sees it, at a cost for every operation.
Seen to work: torch 2.11.0 to 2.15.0.
When gone: waits are not counted as communication; the class is public.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

Wait = Callable[..., Any]


def available() -> bool:
    """Return whether this process has loaded torch, and torch can communicate."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available()


def replace(around: Callable[[Wait], Wait]) -> None:
    """Put `around(wait)` in the place of the method `wait`."""
    import torch.distributed as dist

    work: Any = dist.Work
    work.wait = functools.update_wrapper(around(work.wait), work.wait)


def restore() -> None:
    """Put the method back as it was before `replace`."""
    import torch.distributed as dist

    work: Any = dist.Work
    work.wait = work.wait.__wrapped__
