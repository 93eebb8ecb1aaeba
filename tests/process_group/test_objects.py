"""Objects that ranks send each other, long and short, in as few collectives as they need."""

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.process_group.objects import (
    all_gather_objects,
    broadcast_object,
    gather_objects,
    scatter_objects,
)
from tests.ranks import run_ranks

LONG = "long " * 1000
COLLECTIVES = ("all_gather", "gather", "broadcast", "scatter")


def counted(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return what a call returns, and the number of its collectives."""
    count = 0
    before = {name: getattr(dist, name) for name in COLLECTIVES}

    def counting(name: str) -> Callable[..., Any]:
        def collective(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            return before[name](*args, **kwargs)

        return collective

    for name in COLLECTIVES:
        setattr(dist, name, counting(name))
    try:
        return call(), count
    finally:
        for name, collective in before.items():
            setattr(dist, name, collective)


CASES: dict[str, Callable[[int], Any]] = {
    "all short": lambda rank: {"rank": rank},
    "all long": lambda rank: (rank, LONG),
    "the last long": lambda rank: LONG if rank else None,
    "the first long": lambda rank: None if rank else LONG,
}


def sent_by_each() -> list[str]:
    """Send objects over all ranks, and over a group whose rank 0 is another one; return faults."""
    faults = []
    for place, group in (("all", None), ("group", dist.new_group([1, 2]))):
        if group is None or dist.get_rank():
            faults += [f"{place}, {name}" for name in CASES if not arrives(name, group)]
    return faults


def arrives(name: str, group: Any) -> bool:
    """Return whether all values of a case arrive, in a second collective only if one is long."""
    me = dist.get_rank(group)
    values = [CASES[name](rank) for rank in range(dist.get_world_size(group))]
    needed = 1 if name == "all short" else 2
    of_main = 2 if name in ("all long", "the first long") else 1
    return [
        counted(partial(all_gather_objects, values[me], group)),
        counted(partial(gather_objects, values[me], group)),
        counted(partial(broadcast_object, values[me], group)),
        counted(partial(scatter_objects, [] if me else values, group)),
    ] == [
        (values, needed),
        ([] if me else values, needed),
        (values[0], of_main),
        (values[me], needed),
    ]


def test_objects_come_as_they_were_sent_in_one_collective_or_two() -> None:
    assert run_ranks(sent_by_each, 3) == [[], [], []]


@pytest.mark.parametrize("length", [1007, 1008, 1009])
def test_the_longest_object_that_fits_one_message(length: int) -> None:
    """1,008 bytes fit beside the two sizes."""
    around = len(pickle.dumps(b"x" * 999)) - 999
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        value = b"x" * (length - around)
        (got,), count = counted(partial(all_gather_objects, value))
        assert (got, count) == (value, 1 + (length > 1008))
    finally:
        dist.destroy_process_group()
