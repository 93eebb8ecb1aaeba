"""The function through which torch makes every process group, in the hands of another one.

Public torch: `init_process_group` and `new_group` are public, and `init_device_mesh` makes groups
without either of them. Seen to work: torch 2.13.0. When gone: importing this file raises
AttributeError.

Tests: tests/torch_compat/test_group_creation.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed import distributed_c10d as c10d

_make_of_torch = c10d._new_process_group_helper


def make_each_by(maker: Callable[[Callable[[], Any]], Any]) -> None:
    """Have each group made by `maker(make)`, which returns what `make()` returns, from now on."""

    def make(*args: Any, **more: Any) -> Any:
        return maker(partial(_make_of_torch, *args, **more))

    c10d._new_process_group_helper = make


def restore() -> None:
    """Have torch make groups by itself again."""
    c10d._new_process_group_helper = _make_of_torch
