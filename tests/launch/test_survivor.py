"""A rank that outlives others: what it waits for when nobody answers any more."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lockstep.launch.survivor import Survivor
from lockstep.launch.world import LiveWorld
from tests.ranks import run_ranks


class LastWords(dist.Store):  # type: ignore[misc]
    """A store for a rank that dies when it has told the others its address."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        os._exit(0)


def meet_a_dead_rank(path: str) -> None:
    """Make a group with rank 2, which dies meanwhile, then one without it."""
    os.environ["MASTER_PORT"] = "0"  # the store is the test's: its connections stay
    rank = dist.get_rank()
    if rank == 2:
        make = c10d.ProcessGroupGloo
        c10d.ProcessGroupGloo = lambda store, *more, **named: make(LastWords(store), *more, **named)
        dist.new_group([0, 1, 2])

    survivor = Survivor(Path(path), Path(path).parent)
    if rank == 0:
        tell = LiveWorld(1, (0, 1), lost=(2,)).write
        threading.Timer(1.0, lambda: tell(Path(path))).start()
    with pytest.raises(TimeoutError) as caught:
        dist.new_group([0, 1, 2])
    world = survivor.world_after(caught.value)
    assert world is not None
    assert survivor.enter(world) is None

    group = dist.new_group([0, 1], use_local_synchronization=True)
    total = torch.tensor(rank + 1.0)
    dist.all_reduce(total, group=group)
    survivor.close()
    assert total == 3.0


def test_a_rank_that_dies_while_groups_are_made_is_not_waited_for(tmp_path: Path) -> None:
    """The timeout of the groups is 120 s, and gloo waits for longer."""
    with pytest.raises(AssertionError, match=r"\A2 died\Z"):
        run_ranks(meet_a_dead_rank, 3, str(tmp_path / "world.json"), timeout=60)
