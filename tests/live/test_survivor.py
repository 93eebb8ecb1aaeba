"""A rank that outlives others: what it waits for when nobody answers any more."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lockstep.errors import UsageError
from lockstep.live.survivor import Survivor
from lockstep.live.world import LiveWorld, looks_of
from lockstep.torch_compat.default_store import default_store
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


class OfAnotherThread(dist.Store):  # type: ignore[misc]
    """A store for a rank of which another thread connects to a service while it makes a group."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store
        self._service = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []

    def set(self, key: str, value: Any) -> None:
        connection = socket.create_connection(self._service.getsockname())
        self._connections += [connection, self._service.accept()[0]]
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return bytes(self._store.get(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._store.wait(keys, *timeout)

    def is_connected(self) -> bool:
        """Whether what goes in at one end comes out of the other."""
        here, there = self._connections
        here.sendall(b"word")
        return there.recv(4) == b"word"


def meet_a_dead_rank(folder: str) -> None:
    """Make the world's group with rank 3, which is lost meanwhile, and go on without it.

    Of two ranks one connects to the other: that with the higher port. A rank that connects to the
    lost one is told nothing, and has its group; one that is to be connected to waits. Of three
    ranks in seven launches of eight at least one does. Rank 2 has not begun to make it by then.
    """
    port = int(os.environ["MASTER_PORT"])
    os.environ["MASTER_PORT"] = "0"  # the store is the test's: its connections stay
    rank = dist.get_rank()
    pids: list[int] = [0, 0, 0, 0]
    dist.all_gather_object(pids, os.getpid())
    hosted = default_store()  # kept, by the rank that hosts it
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 3:
        make = c10d.ProcessGroupGloo
        c10d.ProcessGroupGloo = lambda store, *more, **named: make(LastWords(store), *more, **named)
        init(store, "first", 3, 4)

    path = Path(folder, "world.json")
    survivor = Survivor(path, Path(folder))
    if rank == 0:
        world = LiveWorld(1, (0, 1, 2), lost=(3,))
        threading.Timer(1.0, lambda: world.write(path)).start()
    watched = OfAnotherThread(store)
    error: Exception = RuntimeError("connection closed: of a collective in that group")
    try:
        if rank != 2:
            init(watched, "first", rank, 4)
    except TimeoutError as given_up:
        error = given_up
    time.sleep(0.5)  # it has time to cut what it may
    following = survivor.world_after(error)
    assert following is not None
    if dist.is_initialized():
        dist.destroy_process_group()
    assert survivor.enter(following) is None
    assert rank == 2 or watched.is_connected(), "the connection is none to another rank"
    # a thread that was left behind may still wait in the other one
    init(dist.TCPStore("127.0.0.1", port, is_master=False), "second", rank, 3)
    sums = torch.ones(1)
    dist.all_reduce(sums)
    assert sums == 3
    survivor.close()
    if rank == 0:
        os.kill(pids[3], signal.SIGKILL)
    del hosted


def init(store: dist.Store, name: str, rank: int, ranks: int) -> None:
    """Make the group of all ranks."""
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=ranks
    )


def test_a_rank_that_is_lost_while_groups_are_made_is_not_waited_for(tmp_path: Path) -> None:
    """The timeout of the groups is 120 s, and gloo waits for longer.

    The others make the next ones alike, though some have the first one and some have not.
    """
    with pytest.raises(AssertionError, match=r"\A3 died\Z"):
        run_ranks(meet_a_dead_rank, 4, str(tmp_path), timeout=60)


def launcher_looks(path: Path, times: int) -> None:
    """Look at the ranks as a launcher does, and find nobody dead."""
    for number in range(times):
        looks_of(path).touch()
        os.utime(looks_of(path), ns=(number, number))
        time.sleep(0.1)


@pytest.fixture
def survivor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Survivor]:
    monkeypatch.setattr("lockstep.live.survivor._WORD_SECONDS", 0.2)
    monkeypatch.setenv("MASTER_PORT", "0")
    alone = Survivor(tmp_path / "world.json", tmp_path)
    yield alone
    alone.close()


def test_an_error_is_a_rank_s_own_once_the_launcher_has_looked_again(
    survivor: Survivor, tmp_path: Path
) -> None:
    """However long the launcher takes for that: here longer than the time that it has."""
    path = tmp_path / "world.json"
    lost = RuntimeError("Connection closed by peer")
    found: list[LiveWorld | None] = []
    waiting = threading.Thread(target=lambda: found.append(survivor.world_after(lost)))
    waiting.start()
    waiting.join(1.0)
    assert not found, "it has not looked"
    launcher_looks(path, 7)
    waiting.join(20.0)
    assert found == [None]


def test_nobody_waits_for_a_launcher_that_ends_all_ranks(
    survivor: Survivor, tmp_path: Path
) -> None:
    """It looks no more."""
    LiveWorld(0, (0, 1), over=True).write(tmp_path / "world.json")
    assert survivor.world_after(RuntimeError("Connection closed by peer")) is None


def test_a_wrong_use_that_explains_a_lost_rank_waits_for_the_launcher(
    survivor: Survivor, tmp_path: Path
) -> None:
    """A survivor that leaves for the next world is missed by those that are in this one."""
    wrong = UsageError("the config is wrong")
    wrong.__cause__ = wrong
    assert survivor.world_after(wrong) is None
    left = UsageError("rank 0 has left before save")
    left.__cause__ = RuntimeError("Connection closed by peer")
    world = LiveWorld(1, (0,), lost=(1,))
    threading.Timer(0.5, lambda: world.write(tmp_path / "world.json")).start()
    assert survivor.world_after(left) == LiveWorld(1, [0], [], [1], machines=[], gone=[])
