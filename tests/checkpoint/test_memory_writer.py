"""Copies in memory: complete when they are written, in two folders that take turns.

Those of several ranks are among the cases of `test_ranks.py`.
"""

from pathlib import Path

import pytest
import torch

from lockstep import checkpoint
from lockstep.checkpoint import MemoryStorage, MemoryWriter, Snapshot, digest
from lockstep.errors import RunError, UsageError
from tests.checkpoint.shared import CONFIG, blank
from tests.checkpoint.shared import snapshot as snapshot_of


@pytest.fixture
def storage(tmp_path: Path) -> MemoryStorage:
    return MemoryStorage(tmp_path / "memory")


@pytest.fixture
def writer(storage: MemoryStorage) -> MemoryWriter:
    return MemoryWriter(storage)


def copy(writer: MemoryWriter, step: int, snapshot: Snapshot) -> None:
    writer.write(step, snapshot, config_yaml=CONFIG)
    writer.commit(step)


def assert_loads(storage: MemoryStorage, step: int, snapshot: Snapshot) -> None:
    found = checkpoint.resume_point(storage)
    assert found is not None
    assert found.name == f"step-{step:08d}"
    target = blank(snapshot)
    state = checkpoint.load(found, target)
    assert {key: state[key] for key in snapshot.state} == snapshot.state
    for part, tensors in snapshot.tensors().items():
        for name, tensor in tensors.items():
            assert torch.equal(target.tensors()[part][name], tensor), name


def test_a_copy_is_loaded_like_any_checkpoint(storage: MemoryStorage, writer: MemoryWriter) -> None:
    for step in range(1, 6):
        snapshot = snapshot_of(float(step))
        copy(writer, step, snapshot)
        assert storage.steps == [step], "the last one alone"
        assert_loads(storage, step, snapshot)


def test_two_folders_take_turns_and_their_files_are_written_again(
    storage: MemoryStorage, writer: MemoryWriter
) -> None:
    files = []
    for step in range(1, 5):
        copy(writer, step, snapshot_of(float(step)))
        assert len(list(storage.root.iterdir())) == min(step, 2)
        files.append((storage.root / f"step-{step:08d}/model/rank-00000.raw").stat().st_ino)
    assert files[0] != files[1]
    assert files[2:] == files[:2]


def test_a_copy_is_invisible_until_its_step_is_recorded(
    storage: MemoryStorage, writer: MemoryWriter
) -> None:
    copy(writer, 1, snapshot_of(1.0))
    copy(writer, 2, snapshot_of(2.0))
    writer.write(3, snapshot_of(3.0), config_yaml=CONFIG)
    assert storage.steps == [2]
    storage.adopt(2)
    assert storage.steps == [2], "the records have not come to it"
    storage.adopt(3)
    assert storage.steps == [2, 3]
    assert_loads(storage, 3, snapshot_of(3.0))


def test_a_copy_that_not_all_have_written_is_never_shown(
    storage: MemoryStorage, writer: MemoryWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(writer, 1, snapshot_of(1.0))
    copy(writer, 2, snapshot_of(2.0))
    monkeypatch.setattr(MemoryStorage, "mark_complete", lambda _self, _draft: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.write(3, snapshot_of(3.0), config_yaml=CONFIG)
    for step in (1, 3):  # the folder held step 1 before
        storage.adopt(step)
    assert storage.steps == [2]


def test_what_has_changed_is_planned_anew(storage: MemoryStorage, writer: MemoryWriter) -> None:
    for step in range(1, 4):
        copy(writer, step, snapshot_of())
    snapshot = snapshot_of()
    snapshot.optimizers["main"]["head.weight//exp_avg_sq"] = torch.ones(5, 7)
    copy(writer, 4, snapshot)
    assert_loads(storage, 4, snapshot)
    assert len(list(storage.root.iterdir())) == 1, "no folder of the old form"
    copy(writer, 5, snapshot)
    assert_loads(storage, 5, snapshot)


def test_a_run_goes_back_and_copies_again(storage: MemoryStorage, writer: MemoryWriter) -> None:
    for step in range(1, 4):
        copy(writer, step, snapshot_of(float(step)))
    storage.delete_after(1)
    for step in (2, 3, 4):
        copy(writer, step, snapshot_of(-float(step)))
        assert_loads(storage, step, snapshot_of(-float(step)))


def test_a_second_writer_goes_on_where_the_first_has_died(
    storage: MemoryStorage, writer: MemoryWriter
) -> None:
    copy(writer, 1, snapshot_of(1.0))
    copy(writer, 2, snapshot_of(2.0))
    second = MemoryWriter(storage)
    copy(second, 3, snapshot_of(3.0))
    assert [path.name for path in storage.root.iterdir()] == ["step-00000003"]
    assert_loads(storage, 3, snapshot_of(3.0))


def test_what_cannot_be_stored_leaves_the_copies(
    storage: MemoryStorage, writer: MemoryWriter
) -> None:
    for step in range(1, 3):
        copy(writer, step, snapshot_of(float(step)))
    wrong = snapshot_of(3.0)
    wrong.state["values"] = object()
    with pytest.raises(UsageError, match="which JSON can't hold"):
        writer.write(3, wrong, config_yaml=CONFIG)
    assert storage.steps == [2]
    copy(writer, 4, snapshot_of(4.0))
    assert_loads(storage, 4, snapshot_of(4.0))


def test_a_copy_without_room_leaves_the_one_before_it(small_tmpfs: Path) -> None:
    storage = MemoryStorage(small_tmpfs / "memory")
    writer = MemoryWriter(storage)

    def snapshot(step: int) -> Snapshot:
        return Snapshot({"weight": torch.arange(8192.0) * step}, state={})  # 32 of 64 KiB

    copy(writer, 1, snapshot(1))
    for step in (2, 3):
        with pytest.raises(RunError, match="no room for another copy"):
            writer.write(step, snapshot(step), config_yaml=CONFIG)
    assert_loads(storage, 1, snapshot(1))
    assert [path.name for path in storage.root.iterdir()] == ["step-00000001"], "no half copy"


def test_the_newest_copy_becomes_a_checkpoint_of_the_run(
    storage: MemoryStorage, writer: MemoryWriter, tmp_path: Path
) -> None:
    copy(writer, 7, snapshot_of(7.0))
    saved = checkpoint.save_newest(storage, tmp_path / "checkpoints")
    assert saved == tmp_path / "checkpoints/step-00000007"
    assert checkpoint.verify(saved) == []
    assert digest(saved) == digest(storage.path("step-00000007"))
    target = blank(snapshot_of())
    assert checkpoint.load(saved, target)["loss"] == snapshot_of(7.0).state["loss"]


def test_a_copy_elsewhere_is_no_checkpoint(storage: MemoryStorage, writer: MemoryWriter) -> None:
    """Its files have no checksums, which only the launch that wrote it can do without."""
    copy(writer, 7, snapshot_of(7.0))
    (problem, *_) = checkpoint.verify(storage.root / "step-00000007")
    assert "the manifest has no checksum of it" in problem
