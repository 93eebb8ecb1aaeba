"""Saving while training goes on, in one process."""

import threading
import time
from pathlib import Path

import pytest
import torch

from lockstep import checkpoint
from lockstep.checkpoint import AsyncSaver, commit
from lockstep.errors import RunError, UsageError
from tests.checkpoint.shared import assert_same, blank, snapshot


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Background saves stop before they commit until this is set."""
    gate = threading.Event()
    real = commit.Manifest.to_bytes

    def to_bytes(manifest: commit.Manifest) -> bytes:
        assert gate.wait(200)
        return real(manifest)

    monkeypatch.setattr(commit.Manifest, "to_bytes", to_bytes)
    return gate


def test_training_goes_on_and_the_snapshot_does_not(tmp_path: Path, held: threading.Event) -> None:
    live = snapshot()
    saver = AsyncSaver()
    assert saver.poll() is None
    assert saver.save(tmp_path, 1, live, config_yaml="") is None
    for tensor in (
        *live.model.values(),
        *live.optimizers["main"].values(),
        *live.extra["ema"].values(),
    ):
        tensor.zero_()
    live.state["scaler"]["scale"] = 0.0
    live.state["skipped"].append(9)
    assert saver._save is not None
    assert saver.poll() is None
    assert checkpoint.list_checkpoints(tmp_path) == []
    held.set()
    path = saver.wait()
    assert path == tmp_path / "step-00000001"
    assert saver._save is None
    target = blank(snapshot())
    state = checkpoint.load(path, target)
    assert_same(snapshot(), target)
    assert (state["scaler"]["scale"], state["skipped"]) == (65536.0, [1, 2])


def test_one_at_a_time_and_each_is_reported_once(tmp_path: Path) -> None:
    done: list[Path] = []
    saver = AsyncSaver(then=done.append)
    assert saver.save(tmp_path, 1, snapshot(1.0), config_yaml="") is None
    assert saver.save(tmp_path, 2, snapshot(2.0), config_yaml="") == tmp_path / "step-00000001"
    assert saver.wait() == tmp_path / "step-00000002"
    assert saver.wait() is None
    assert done == checkpoint.list_checkpoints(tmp_path)
    for step in (1, 2):
        target = blank(snapshot())
        checkpoint.load(tmp_path / f"step-{step:08d}", target)
        assert_same(snapshot(float(step)), target)


@pytest.mark.fault(
    "storage: a save in the background fails",
    "the writer's thread meets an error",
    "it surfaces on every rank at the same later step, not at the end",
)
def test_trap_51_an_error_in_the_background_is_told(tmp_path: Path) -> None:
    """torch reports the error of an asynchronous save only to whoever asks for its result."""
    (tmp_path / "file").write_text("")
    saver = AsyncSaver()
    saver.save(tmp_path / "file", 1, snapshot(), config_yaml="")
    deadline = time.monotonic() + 200
    with pytest.raises(RunError, match="step 1 was not written"):  # noqa: PT012
        while time.monotonic() < deadline:
            saver.poll()
    saver.save(tmp_path / "file", 2, snapshot(), config_yaml="")
    with pytest.raises(RunError, match="step 2 was not written"):
        saver.save(tmp_path, 3, snapshot(), config_yaml="")
    saver.save(tmp_path, 4, snapshot(), config_yaml="")
    assert saver.wait() == tmp_path / "step-00000004"


def test_a_snapshot_that_can_not_be_stored_is_told_at_once(tmp_path: Path) -> None:
    bad = snapshot()
    bad.state["tensor"] = torch.zeros(1)
    saver = AsyncSaver()
    with pytest.raises(UsageError, match="JSON can't hold"):
        saver.save(tmp_path, 1, bad, config_yaml="")
    assert saver._save is None
