"""The function through which torch makes every process group, in the hands of another one.

Public torch: `init_process_group` and `new_group` are public, and `init_device_mesh` makes groups
without either of them; nothing public changes the count by which it names them. Seen to work:
torch 2.13.0. When gone: importing this file raises AttributeError, or `begin_anew` does.

Tests: tests/torch_compat/test_group_creation.py
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed import distributed_c10d as c10d

_make_of_torch = c10d._new_process_group_helper
_NAMES_EACH = 1_000_000  # more groups than a world makes


def make_each_by(maker: Callable[[Callable[[], Any]], Any]) -> None:
    """Have each group made by `maker(make)`, which returns what `make()` returns, from now on."""

    def make(*args: Any, **more: Any) -> Any:
        return maker(partial(_make_of_torch, *args, **more))

    c10d._new_process_group_helper = make


def restore() -> None:
    """Have torch make groups by itself again."""
    c10d._new_process_group_helper = _make_of_torch


def begin_anew(world: int) -> None:
    """Name groups from the beginning, so that ranks which have made different ones agree again.

    Torch names them by a count that begins anew when the world's group is destroyed: not on a rank
    that has none, because it gave up while it was made. And a thread that was left there may still
    come to its end, and keep its group: so the names of each world are other ones.

    Args:
        world: its number. There is no group at this moment.
    """
    of_torch = c10d._world
    for kept in (
        of_torch.pg_map,
        of_torch.pg_names,
        of_torch.pg_group_ranks,
        of_torch.pg_backend_config,
        of_torch.pg_to_tag,
        of_torch.tags_to_pg,
    ):
        kept.clear()
    of_torch.group_count = world * _NAMES_EACH
