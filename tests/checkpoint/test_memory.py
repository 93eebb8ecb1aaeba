"""Copies in memory are checkpoints like any other; the folder holds the last one, and the next."""

from pathlib import Path

import pytest
import torch

from lockstep import checkpoint
from lockstep.checkpoint import MemoryStorage, Snapshot
from lockstep.errors import RunError


def saved(storage: MemoryStorage, step: int) -> torch.Tensor:
    values = torch.arange(4096.0) * step
    checkpoint.save(storage, step, Snapshot({"weight": values}), config_yaml="")
    return values


def test_a_copy_is_loaded_like_any_checkpoint(tmp_path: Path) -> None:
    storage = MemoryStorage(tmp_path / "memory")
    values = saved(storage, 3)
    loaded = torch.zeros(4096)
    found = checkpoint.resume_point(storage)
    assert found is not None
    checkpoint.load(found, Snapshot({"weight": loaded}))
    assert torch.equal(loaded, values)


def test_only_the_newest_stays_and_later_ones_go_on_a_way_back(tmp_path: Path) -> None:
    storage = MemoryStorage(tmp_path / "memory")
    for step in (1, 2, 3):
        saved(storage, step)
    draft = storage.begin("step-00000009")
    assert storage.steps == [1, 2, 3], "a draft is not a checkpoint"
    storage.delete(draft)
    storage.delete_after(2)
    assert storage.steps == [1, 2]
    storage.delete_others(2)
    assert [path.name for path in storage.root.iterdir()] == ["step-00000002"]


def test_a_copy_without_room_leaves_the_one_before_it(small_tmpfs: Path) -> None:
    storage = MemoryStorage(small_tmpfs / "memory")
    saved(storage, 1)
    saved(storage, 2)
    with pytest.raises(RunError, match="no room for another copy") as caught:
        saved(storage, 3)
    assert "KiB of 64 KiB are free" in str(caught.value)
    assert "--shm-size" in str(caught.value)
    left = checkpoint.newest(storage, thorough=True)
    assert left is not None, "the last complete one"
    assert not [path for path in storage.root.iterdir() if ".tmp-" in path.name], "no half copy"
