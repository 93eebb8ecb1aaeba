"""Whatever happens to the bytes on disk is noticed before anything is trusted."""

import logging
import random
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lockstep import checkpoint
from lockstep.checkpoint import DamagedError
from lockstep.errors import RunError, UsageError
from tests.checkpoint import places
from tests.checkpoint.places import Place
from tests.checkpoint.shared import blank, save, snapshot

LIMIT = 60  # positions of a file that are tried: all of a short one


@pytest.fixture(params=places.damaged())
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty storage, as elsewhere; the disks of two hosts are one here, too."""
    return places.made_for(request, tmp_path)


def positions(size: int) -> list[int]:
    chosen = {0, size - 1, *random.Random(0).sample(range(size), min(size, LIMIT))}
    return sorted(chosen)


@pytest.mark.fault(
    "checkpoint: one flipped bit",
    "anywhere in any file",
    "noticed by `checkpoint verify` and on load: nothing is loaded",
)
@pytest.mark.parametrize(
    "place",
    [*places.tested(), pytest.param(places.DISKS, marks=pytest.mark.full)],
    indirect=True,
)
@pytest.mark.promise("Every byte has a CRC-32. That finds damage")
def test_trap_50_one_flipped_bit_in_any_file_is_noticed(place: Place) -> None:
    """torch's own format has no checksum: flipped bits load successfully."""
    path = place.save(1)
    with place.reads_once():
        _flip_everywhere(place, path)
    assert checkpoint.verify(path) == []


def _flip_everywhere(place: Place, path: Any) -> None:
    """Flip a bit in each file, at many positions."""
    assert checkpoint.verify(path) == []
    for file in place.files(path):
        data = place.content(path, file)
        where = range(len(data)) if file == "manifest.json" else positions(len(data))
        for position in where:
            place.flip(path, file, position)
            assert checkpoint.verify(path), f"{file}, byte {position}"
            place.damage(path, file, data)
        place.flip(path, file, len(data) // 2)
        target = blank(snapshot())
        with pytest.raises(DamagedError):
            checkpoint.load(path, target)
        assert not any(tensor.any() for tensor in target.model.values())
        place.damage(path, file, data)


@pytest.mark.fault(
    "checkpoint: files cut short, longer, or missing",
    "half a copy, a bad disk",
    "noticed by their sizes, without reading them",
)
def test_cut_lengthened_and_missing_files_are_noticed_at_a_glance(place: Place) -> None:
    path = place.save(1)
    for file in place.files(path):
        data = place.content(path, file)
        for damaged in (data[:-1], data[: len(data) // 2], b"", data + b"\0"):
            place.damage(path, file, damaged)
            assert checkpoint.verify(path, thorough=False), (
                f"{file}: {len(damaged)} of {len(data)} bytes"
            )
        place.damage(path, file, None)
        assert checkpoint.verify(path, thorough=False), f"{file}: missing"
        place.damage(path, file, data)
    assert checkpoint.verify(path) == []


@pytest.mark.fault(
    "checkpoint: a renamed folder",
    "step-100 is called step-200",
    "noticed: the manifest knows its step",
)
def test_a_renamed_checkpoint_is_not_taken_for_another_step(place: Place) -> None:
    place.save(1)
    place.storage.move("step-00000001", "step-00000009")
    assert "not the step of its name" in checkpoint.verify(place.storage.path("step-00000009"))[0]


@pytest.mark.fault(
    "checkpoint: the newest is damaged",
    "a run resumes",
    "it is passed over with a warning that says why, and the newest good one is used",
)
def test_newest_passes_over_what_is_damaged_and_says_so(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third, fourth = (place.save(step) for step in (1, 2, 3, 4))
    place.damage(fourth, "manifest.json", None)
    for file in place.files(third):
        if file.startswith("optimizer/"):
            place.damage(third, file, None)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest(place.directory) == second
    assert "step-00000004" in caplog.text
    assert "optimizer/main/.metadata: missing" in caplog.text
    place.flip(second, "model/__0_0.distcp", 1000)
    assert checkpoint.newest(place.directory) == second, "at a glance the sizes are right"
    with patch("lockstep.checkpoint.keep._warn") as warn:
        assert checkpoint.newest(place.directory, thorough=True) == first
    told = [(path.name, why) for path, why in (call.args for call in warn.call_args_list)]
    assert [name for name, _ in told] == ["step-00000004", "step-00000003", "step-00000002"]
    assert checkpoint.resume_point(place.directory) == first


@pytest.mark.fault(
    "checkpoint: all are damaged",
    "a run resumes",
    "it fails with exit code 1: to start afresh is for a person to decide",
)
def test_trap_53_all_damaged_is_a_hard_failure(place: Place) -> None:
    """A run that starts afresh because no checkpoint could be read has lost everything,
    silently.
    """
    for step in (1, 2):
        place.damage(place.save(step), "state.json", None)
    for choose in (checkpoint.newest, checkpoint.resume_point):
        with pytest.raises(RunError, match="none of the 2 checkpoints"):
            choose(place.directory)


def test_trap_53_the_last_one_fails_only_under_its_checksum(place: Place) -> None:
    """The one checkpoint looks whole until its bytes are read: still a hard failure, not a fresh
    start.
    """
    place.flip(place.save(1), "model/__0_0.distcp", 1000)
    with pytest.raises(RunError, match="none of the 1 checkpoints"):
        checkpoint.resume_point(place.directory)


def test_no_checkpoint_at_all_is_a_fresh_start(place: Place, tmp_path: Path) -> None:
    for directory in (place.directory, tmp_path / "not there"):
        assert checkpoint.newest(directory) is None
        assert checkpoint.resume_point(directory) is None
    with pytest.raises(UsageError, match="there is no checkpoint at"):
        checkpoint.load(place.storage.path("step-00000001"), snapshot())


@pytest.mark.fault(
    "checkpoint: folders with names like one",
    "step-100.tmp, step-100-old, xstep-100",
    "they are not checkpoints",
)
def test_trap_52_unfinished_folders_are_not_checkpoints(tmp_path: Path) -> None:
    """An unanchored pattern takes step-100.tmp for a checkpoint of step 100."""
    real = save(tmp_path, 100)
    for name in (
        "step-00000200.tmp",
        "step-00000200.tmp-host-1-0123abcd",
        "step-200",
        "xstep-00000200",
        "step-00000200 ",
        "step-00000200\n",
        "step-0000020x",
        "step-000000200",
        "step-٠٠٠٠٠٢٠٠",
        "step-00000200.aside-1",
        "step--0000200",
    ):
        shutil.copytree(real, tmp_path / name)
    (tmp_path / "step-00000300").write_text("a file")
    (tmp_path / "step-00000400").symlink_to(real)
    assert checkpoint.list_checkpoints(tmp_path) == [real]
    assert checkpoint.newest(tmp_path) == real
    shutil.copytree(real, tmp_path / "step-123456789")
    assert len(checkpoint.list_checkpoints(tmp_path)) == 2, "nine digits, for a long run"
