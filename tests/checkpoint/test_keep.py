"""What is kept, what goes, what is swept."""

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from lockstep import checkpoint
from lockstep.checkpoint.commit import SHARED_MARK
from lockstep.checkpoint.posix import PosixStorage, draft_name
from tests.checkpoint.places import Place


def steps(place: Place) -> list[int]:
    return [int(name.removeprefix("step-")) for name in place.names()]


def test_the_newest_are_kept(place: Place) -> None:
    paths = [place.save(step) for step in (1, 2, 3, 4, 5)]
    directory = place.directory
    assert checkpoint.rotate(directory, None) == []
    assert checkpoint.rotate(directory, keep=2, protect=[paths[1]]) == [paths[2], paths[0]]
    assert steps(place) == [2, 4, 5]
    assert checkpoint.rotate(directory, keep=2, protect=[paths[1], paths[4]]) == []
    assert checkpoint.rotate(directory, keep=1) == [paths[3], paths[1]]
    assert checkpoint.rotate(directory, keep=1) == []
    assert steps(place) == [5], "never the only one"


@pytest.mark.fault(
    "storage: the newest checkpoint is damaged when old ones are due to go",
    "rotation runs",
    "nothing is deleted before a newer one is proved byte by byte",
)
def test_trap_51_nothing_goes_before_the_newest_is_proved(place: Place) -> None:
    """The new checkpoint is damaged, and the old good ones are pruned in its favour."""
    newest = [place.save(step) for step in (1, 2, 3)][-1]
    place.flip(newest, "model/__0_0.distcp", 500)
    with patch("lockstep.checkpoint.keep._warn") as warn:
        assert checkpoint.rotate(place.directory, keep=1) == []
    assert steps(place) == [1, 2, 3]
    assert "checksum" in warn.call_args.args[1]


def test_damaged_ones_do_not_count_and_do_not_go(place: Place) -> None:
    for step in (1, 2, 3, 4):
        path = place.save(step)
        if step in (1, 3):
            place.damage(path, "state.json", None)
    checkpoint.rotate(place.directory, keep=1)
    assert steps(place) == [1, 3, 4]


def test_dead_writers_are_swept_and_living_ones_spared(tmp_path: Path) -> None:
    finished = subprocess.Popen([sys.executable, "-c", ""])
    finished.wait()
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    dead = [
        tmp_path / draft_name(SHARED_MARK, pid=finished.pid),
        tmp_path / draft_name("step-00000001", pid=finished.pid),
        tmp_path / draft_name("step-00000002", pid=os.getpid()),  # this pid earlier
        tmp_path / draft_name("step-00000003", "elsewhere", 1),
    ]
    spared = [
        tmp_path / draft_name("step-00000004", pid=living.pid),
        tmp_path / draft_name("step-00000005", "elsewhere", 1),
        tmp_path / "step-00000006.tmp",
        tmp_path / "notes.tmp-host-1-00000007",
        tmp_path / "step-00000008",
    ]
    for folder in dead + spared:
        (folder / "model").mkdir(parents=True)
    for path in (dead[3] / "model", dead[3]):
        os.utime(path, (1, 1))
    assert [tmp_path / name for name in PosixStorage(tmp_path).sweep()] == sorted(dead)
    assert sorted(tmp_path.iterdir()) == sorted(spared)
    living.communicate(b"\n")
    assert PosixStorage(tmp_path / "not there").sweep() == []


def test_going_back_sets_the_later_ones_aside(place: Place) -> None:
    """Resumed from step 2 on purpose, a restart must not go on from the old step 4."""
    for step in (1, 2, 3, 4):
        place.save(step)
    checkpoint.set_aside(place.directory, after=2)
    assert steps(place) == [1, 2]
    assert checkpoint.newest(place.directory).name == "step-00000002"
    (aside,) = (name for name in place.storage.names() if name.startswith("step-00000004.aside-"))
    assert checkpoint.verify(place.storage.path(aside)) == []
    place.save(3)
    assert steps(place) == [1, 2, 3]
    assert checkpoint.set_aside(place.directory, after=3) == []


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        checkpoint.rotate(tmp_path, keep=0)
