"""What reads a checkpoint far away tensor by tensor takes each byte once, and uses no other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import checkpoint
from lockstep.checkpoint import DamagedError, Location, Snapshot, read_once
from lockstep.checkpoint.convert import rewrite_full
from lockstep.checkpoint.storage import MARK_BYTES
from tests.checkpoint.shared import CONFIG, flip
from tests.checkpoint.test_fetch import MODEL, NAME, OPTIMIZER, Far, saved, state

Read = Callable[[Location, Path], Any]
READS: dict[str, Read] = {
    "digest": lambda far, _folder: checkpoint.digest(far),
    "weights": lambda far, _folder: checkpoint.weights(far),
    "export": lambda far, folder: checkpoint.export_safetensors(far, folder / "out"),
    "convert": lambda far, folder: rewrite_full(far, folder / NAME),
}


@pytest.mark.parametrize("name", READS)
def test_each_byte_is_read_once(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was read for its checksum, and for its value; and what is read ahead is bounded."""
    monkeypatch.setattr(read_once, "_AHEAD", 2 * MARK_BYTES)
    far = saved(tmp_path / "far")
    assert isinstance(far.storage, Far)
    found = READS[name](far, tmp_path)
    is_whole = name == "convert"
    for file, info in checkpoint.read_manifest(tmp_path / "far" / NAME).files.items():
        read = far.storage.read_bytes.get(file, 0)
        assert read == info.size or (not is_whole and not file.startswith("model/")), file
        assert is_whole or not file.startswith("optimizer/") or not read
    if name == "digest":
        assert found == checkpoint.digest(tmp_path / "far" / NAME)
    elif name == "weights":
        assert all(found[key].equal(tensor) for key, tensor in state().model.items())
    elif name == "convert":
        assert checkpoint.verify(tmp_path / NAME) == []
        assert checkpoint.digest(tmp_path / NAME) == checkpoint.digest(tmp_path / "far" / NAME)


@pytest.mark.parametrize("name", READS)
def test_damage_is_told_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    far = saved(tmp_path / "far")
    for file in [MODEL, "model/.metadata", *[OPTIMIZER] * (name == "convert")]:
        path = tmp_path / "far" / NAME / file
        data = path.read_bytes()
        for damaged in (bytes([data[0] ^ 1, *data[1:]]), data[:-1], None):
            path.unlink()
            if damaged is not None:
                path.write_bytes(damaged)
            with pytest.raises(DamagedError, match=f"{NAME} is damaged\n.*{file}: "):
                READS[name](far, tmp_path)
            assert [place.name for place in tmp_path.iterdir()] == ["far"]
            path.write_bytes(data)


def test_bytes_that_no_tensor_needs_are_compared(tmp_path: Path) -> None:
    """As those of a loss function, which are not exported."""
    model = {"net": torch.zeros(300_000), "zz.loss": torch.ones(600_000)}
    state = {"loss_fn": ["zz.loss"]}
    path = checkpoint.save(tmp_path, 1, Snapshot(model, state=state), config_yaml=CONFIG)
    flip(tmp_path / NAME / MODEL, 3 * MARK_BYTES)
    assert isinstance(path, Path)
    for read in (
        checkpoint.weights,
        lambda far: checkpoint.export_safetensors(far, tmp_path / "out"),
    ):
        with pytest.raises(DamagedError, match=f"{MODEL}: its checksum is not that"):
            read(Location(Far(tmp_path), NAME))
    assert not (tmp_path / "out").exists()
