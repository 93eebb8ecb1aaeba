"""The function through which torch makes every process group, with a block around each call.

Public torch: `init_process_group` and `new_group` are public, and `init_device_mesh` makes groups
without either of them. Seen to work: torch 2.13.0. When gone: importing this file raises
AttributeError.

Tests: tests/torch_compat/test_group_creation.py
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed import distributed_c10d as c10d

_make_of_torch = c10d._new_process_group_helper


def enter_for_each(block: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter a new `block` around the making of each group, from now on."""

    def make(*args: Any, **more: Any) -> Any:
        with block():
            return _make_of_torch(*args, **more)

    c10d._new_process_group_helper = make


def restore() -> None:
    """Make groups without a block again."""
    c10d._new_process_group_helper = _make_of_torch
