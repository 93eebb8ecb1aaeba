"""A rank that outlives others: what it waits for when nobody answers any more."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lockstep.launch.survivor import Survivor
from lockstep.launch.world import LiveWorld
from tests.ranks import run_ranks


class LastWords(dist.Store):  # type: ignore[misc]
    """A store for a rank that does nothing more when it has told the others its address.

    It is stopped, and killed at the end of the test: so its address is one that still listens.
    """

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)
        os.kill(os.getpid(), signal.SIGSTOP)


def meet_a_dead_rank(folder: str) -> None:
    """Make a group with rank 3, which is lost meanwhile, and enter a world without it.

    Of two ranks one connects to the other: that with the higher port. A rank that connects to the
    lost one is told nothing, and has its group; one that is to be connected to waits. Of three
    ranks in seven launches of eight at least one does.
    """
    os.environ["MASTER_PORT"] = "0"  # the store is the test's: its connections stay
    rank = dist.get_rank()
    pids: list[int] = [0, 0, 0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 3:
        make = c10d.ProcessGroupGloo
        c10d.ProcessGroupGloo = lambda store, *more, **named: make(LastWords(store), *more, **named)
        dist.new_group([0, 1, 2, 3])

    path = Path(folder, "world.json")
    survivor = Survivor(path, Path(folder))
    if rank == 0:
        world = LiveWorld(1, (0, 1, 2), lost=(3,))
        threading.Timer(1.0, lambda: world.write(path)).start()
    error: Exception = RuntimeError("connection closed: of a collective in that group")
    try:
        dist.new_group([0, 1, 2, 3])
    except TimeoutError as given_up:
        error = given_up
    following = survivor.world_after(error)
    assert following is not None
    assert survivor.enter(following) is None
    survivor.close()
    if rank == 0:
        os.kill(pids[3], signal.SIGKILL)


def test_a_rank_that_is_lost_while_groups_are_made_is_not_waited_for(tmp_path: Path) -> None:
    """The timeout of the groups is 120 s, and gloo waits for longer."""
    with pytest.raises(AssertionError, match=r"\A3 died\Z"):
        run_ranks(meet_a_dead_rank, 4, str(tmp_path), timeout=60)
