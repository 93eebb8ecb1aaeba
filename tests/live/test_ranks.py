"""Who goes on after deaths: the launcher's decisions, without processes."""

from pathlib import Path

import pytest

from lockstep.failures.failure import done_mark
from lockstep.heartbeat.watcher import delete_beats
from lockstep.live.ranks import LiveRanks
from lockstep.live.world import LiveWorld


@pytest.fixture
def told() -> list[LiveWorld]:
    """The worlds that were told to people."""
    return []


@pytest.fixture
def even(tmp_path: Path, told: list[LiveWorld]) -> LiveRanks:
    """Four ranks of a config that takes even numbers of them."""
    live = LiveRanks(
        tmp_path / "world.json",
        tmp_path,
        tmp_path,
        lambda ranks, _each: ranks % 2 == 0,
        told.append,
    )
    live.begin(4)
    return live


def now(live: LiveRanks, folder: Path) -> LiveWorld:
    """What the ranks read."""
    world = LiveWorld.read(folder / "world.json")
    assert [*world.members] == [*live.world.members]
    return world


def test_spares_wait_and_take_a_later_place(
    even: LiveRanks, told: list[LiveWorld], tmp_path: Path
) -> None:
    assert even.go_on_without({2})
    first = now(even, tmp_path)
    assert (first.members, first.spares, first.lost) == ([0, 1], [3], [2])
    assert even.by_rank({0: 10, 1: 11, 2: 12, 3: 13}) == {0: 10, 1: 11}
    assert even.folder.is_dir(), "each generation counts its calls anew"
    assert even.go_on_without({0})
    second = now(even, tmp_path)
    assert (second.generation, second.members, second.spares) == (2, [1, 3], [])
    assert [world.generation for world in told] == [1, 2]


def test_a_new_start_finds_no_heartbeats_of_the_worlds_before(
    even: LiveRanks, tmp_path: Path
) -> None:
    (tmp_path / "world.json").rename(tmp_path / "beat-0")
    even.go_on_without({2})
    even.begin(4)
    (tmp_path / "world.json").unlink()
    delete_beats(tmp_path)
    assert not any(tmp_path.iterdir())
    assert even.go_on_without({3}), "the generation of that name is a new one"


def test_too_few_ranks_are_not_told_to_go_on(even: LiveRanks, tmp_path: Path) -> None:
    assert not even.go_on_without({0, 1, 2})
    assert even.refusal == "1 rank of 4 would be left, and the config can't train on so few"
    assert not even.go_on_without({0, 1, 2, 3})
    assert now(even, tmp_path).generation == 0


def test_a_rank_that_has_left_is_not_told_to_go_on(even: LiveRanks, tmp_path: Path) -> None:
    (tmp_path / done_mark(1)).touch()
    assert not even.go_on_without({0})
    assert even.refusal == "rank 1 has done its work, and can't take part in steps again"


def test_nobody_stops_for_a_spare_that_dies(
    even: LiveRanks, told: list[LiveWorld], tmp_path: Path
) -> None:
    even.go_on_without({2})
    assert even.go_on_without({3})
    world = now(even, tmp_path)
    assert (world.generation, world.members, world.spares) == (1, [0, 1], [])
    assert len(told) == 1


def test_spares_may_leave_when_all_others_are_done(even: LiveRanks, tmp_path: Path) -> None:
    even.go_on_without({2})
    (tmp_path / done_mark(0)).touch()
    even.end_if_done()
    assert not now(even, tmp_path).ended
    (tmp_path / done_mark(1)).touch()
    even.end_if_done()
    assert now(even, tmp_path).ended
    even.give_up()
    assert now(even, tmp_path).over
