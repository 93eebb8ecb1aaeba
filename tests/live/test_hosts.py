"""Launchers of several hosts that agree on who goes on: their decisions, without processes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.errors import RunError, UsageError
from lockstep.failures.failure import done_mark
from lockstep.live import hosts as live_hosts
from lockstep.live.hosts import LiveHosts
from lockstep.live.ranks import Seen
from lockstep.live.world import LiveWorld, looks_of
from tests.launch.shared import wait_for

NOBODY: frozenset[int] = frozenset()


class Launchers:
    """Two launchers of two ranks each, as threads would be of two hosts."""

    def __init__(self, folder: Path, can_train: Callable[[int, int], bool]) -> None:
        self.folder = folder
        self.store = dist.HashStore()
        self.told: list[LiveWorld] = []
        self.failures = folder / "run/logs/failures"
        self.failures.mkdir(parents=True)
        self.hosts = []
        for number in (0, 1):
            beats = folder / f"beats-{number}"
            beats.mkdir()
            path = folder / f"world-{number}.json"
            self.hosts.append(LiveHosts(path, beats, self.failures, can_train, self.told.append))

    def meet(self) -> None:
        errors: list[BaseException] = []

        def meet(number: int) -> None:
            ranks = [2 * number, 2 * number + 1]
            try:
                self.hosts[number].meet(self.store, number, 2, ranks)
            except UsageError as error:
                errors.append(error)

        threads = [threading.Thread(target=meet, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            assert len(errors) == 2, "both launchers end"
            raise errors[0]
        for host in self.hosts:
            host.begin(2)

    def look(self, number: int, *killed: int, failed: tuple[int, ...] = ()) -> bool:
        """Look at the ranks of a host, of which some were killed, or have failed by themselves."""
        gone = frozenset((*killed, *failed))
        return self.hosts[number].look(Seen(time.monotonic(), gone, frozenset(killed), True))

    def world(self, number: int) -> LiveWorld:
        """What the ranks of a host read."""
        return LiveWorld.read(self.folder / f"world-{number}.json")

    def come_to(self, condition: Callable[[LiveWorld], bool], *numbers: int) -> None:
        """Wait until the ranks of these hosts read it."""
        for number in numbers:
            wait_for(lambda number=number: condition(self.world(number)), 30)  # type: ignore[misc]


@pytest.fixture
def launchers(tmp_path: Path) -> Iterator[Launchers]:
    made = Launchers(tmp_path, lambda ranks, _each: ranks > 1)
    yield made
    for host in made.hosts:
        with suppress(RuntimeError):
            host.close()


def test_a_rank_that_dies_on_either_host_is_told_on_both(launchers: Launchers) -> None:
    launchers.meet()
    assert launchers.look(0)
    assert launchers.look(1, 2), "the first launcher says who goes on"
    launchers.come_to(lambda world: world.generation == 1, 0, 1)
    for number in (0, 1):
        world = launchers.world(number)
        assert (world.members, world.machines, world.lost) == ([0, 1, 3], [0, 0, 1], [2])
        assert world.each_machine == 1
        assert (launchers.folder / f"beats-{number}/generation-1").is_dir()
        assert world.noticed >= world.died > 0, "by the clock of that host"
    assert [launchers.world(0).on_machine(rank) for rank in range(3)] == [(0, 2), (1, 2), (0, 1)]
    assert launchers.look(0, 0)
    launchers.come_to(lambda world: world.generation == 2, 0, 1)
    assert launchers.world(1).members == [1, 3], "rank 0's host still says who goes on"
    assert [world.generation for world in launchers.told] == [1, 2], "it is told to people once"
    assert launchers.hosts[0].by_rank({0: 10, 1: 11}) == {0: 11}


def test_a_host_whose_ranks_are_all_lost_waits_for_the_others(launchers: Launchers) -> None:
    """It may be the one whose launcher has the stores."""
    launchers.meet()
    launchers.look(0, 0, 1)
    launchers.come_to(lambda world: world.generation == 1, 0, 1)
    nothing = Seen(time.monotonic(), NOBODY, NOBODY, running=False)
    assert launchers.hosts[0].look(nothing)
    for rank in (2, 3):
        (launchers.failures / done_mark(rank)).touch()
    launchers.look(1)
    launchers.come_to(lambda world: world.ended, 0, 1)
    assert not launchers.hosts[0].look(nothing)
    launchers.hosts[0].give_up()
    time.sleep(0.2)
    assert not launchers.world(1).over, "it has ended well"


@pytest.mark.parametrize("number", [0, 1])
def test_an_error_of_a_rank_s_own_ends_all_on_both_hosts(launchers: Launchers, number: int) -> None:
    launchers.meet()
    assert not launchers.look(number, failed=(2 * number,))
    launchers.hosts[number].give_up()
    launchers.come_to(lambda world: world.over, 0, 1)
    assert not launchers.look(1 - number)


def test_too_few_ranks_are_told_so_on_both_hosts(launchers: Launchers) -> None:
    launchers.meet()
    launchers.look(0, 0, 1)
    launchers.look(1, 2)
    launchers.come_to(lambda world: world.over, 0, 1)
    for host in launchers.hosts:
        wait_for(lambda host=host: "can't train on so few" in host.refusal, 30)


def test_looks_count_once_all_launchers_have_looked(launchers: Launchers) -> None:
    """Else a rank that waits for them would take a death elsewhere for an error of its own."""
    launchers.meet()
    looks = [looks_of(launchers.folder / f"world-{number}.json") for number in (0, 1)]
    for _ in range(3):
        launchers.look(0)
        time.sleep(0.1)
    assert not any(path.exists() for path in looks)
    launchers.look(1)
    wait_for(lambda: all(path.exists() for path in looks), 30)


def test_a_launcher_that_says_nothing_is_taken_for_lost(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_hosts, "SILENT_SECONDS", 1.0)
    launchers.meet()
    quiet = launchers.hosts[1]
    quiet.close()
    launchers.come_to(lambda world: world.generation == 1, 0)
    world = launchers.world(0)
    assert (world.members, world.lost, world.gone) == ([0, 1], [2, 3], [1])
    assert launchers.hosts[0].lost_machines == {1}
    assert launchers.hosts[0].keeps_copies
    quiet._thread = live_hosts.StoreThread(quiet._talk, "again")
    wait_for(lambda: quiet.world.gone, 30)
    with pytest.raises(RunError, match="have gone on without this one"):
        launchers.look(1)
    assert launchers.world(1).generation == 0, "its ranks are not told to go on"


class Ended(dist.Store):  # type: ignore[misc]
    """A store whose host has ended."""

    def set(self, key: str, value: Any) -> None:
        raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize("closed", [True, False])
def test_without_the_first_launcher_nobody_goes_on(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch, closed: bool
) -> None:
    """Its store was closed, or it says nothing any more: then it may live, and the others train."""
    monkeypatch.setattr(live_hosts, "SILENT_SECONDS", 1.0)
    launchers.meet()
    second = launchers.hosts[1]
    if closed:
        second._store = Ended()
    else:
        launchers.hosts[0].close()

    def fails() -> bool:
        with suppress(RunError):
            launchers.look(1)
            return False
        return True

    wait_for(fails, 30)
    with pytest.raises(RunError, match="which says who goes on after deaths, is gone"):
        launchers.look(1)
    assert second.keeps_copies == closed


def test_hosts_that_do_not_share_the_run_directory_are_refused(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_hosts, "_LOOKS_FOR_FILE", 1)
    elsewhere = launchers.folder / "other/logs/failures"
    elsewhere.mkdir(parents=True)
    launchers.hosts[1]._failures = elsewhere
    with pytest.raises(UsageError, match="needs a run directory that all machines share"):
        launchers.meet()
