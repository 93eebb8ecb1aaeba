"""Weights of other trainers: files as they leave them become a checkpoint that a model of ours
takes up.
"""

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lockstep import checkpoint
from lockstep.checkpoint.commands import run
from lockstep.errors import LockstepError, UsageError


class Tied(nn.Module):
    """Two names for one matrix, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.state_dict())


def lightning(folder: Path, model: nn.Module) -> Path:
    """What `Trainer.save_checkpoint` of Lightning writes: the module's weights below the name of
    its attribute.
    """
    state = {f"model.{name}": tensor for name, tensor in weights(model).items()} | {
        "metric.total": torch.ones(1)
    }
    whole = {
        "epoch": 2,
        "global_step": 60,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": state,
    }
    torch.save(
        whole | {"optimizer_states": [{"state": {}, "param_groups": []}], "callbacks": {}},
        folder / "last.ckpt",
    )
    return folder / "last.ckpt"


def accelerate(folder: Path, model: nn.Module) -> Path:
    """What `Accelerator.save_state` writes: one of two tied names, the other in the metadata."""
    state = weights(model)
    del state["head.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt", "head.weight": "embed.weight"})
    (folder / "optimizer.bin").write_bytes(b"")
    return folder


def in_parts(folder: Path, model: nn.Module) -> Path:
    names = [name for name in weights(model) if name != "head.weight"]
    where = {name: f"model-{i % 2 + 1}-of-2.safetensors" for i, name in enumerate(names)}
    for file in set(where.values()):
        save_file(
            {name: weights(model)[name] for name in names if where[name] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def compiled_ddp(folder: Path, model: nn.Module) -> Path:
    half = {
        name: t.bfloat16() if t.is_floating_point() else t for name, t in weights(model).items()
    }
    torch.save(
        {f"_orig_mod.module.{name}": tensor for name, tensor in half.items()}, folder / "model.pt"
    )
    return folder / "model.pt"


@pytest.mark.parametrize(
    "write", [lightning, accelerate, in_parts, compiled_ddp], ids=lambda f: f.__name__
)
def test_weights_of_others_are_taken_up(tmp_path: Path, model: Tied, write: Any) -> None:
    prefix = {"prefix": "model."} if write is lightning else {}
    said = run("import", write(tmp_path, model), output=tmp_path / "imported", **prefix)
    assert ("1 without the prefix left out" in said) == (write is lightning)
    whole = checkpoint.weights(tmp_path / "imported")
    assert ("head.weight" in whole) == (write is not in_parts), (
        "nothing there says that they are tied"
    )
    for name, tensor in whole.items():
        expected = weights(model)[name]
        assert tensor.dtype == expected.dtype
        torch.testing.assert_close(
            tensor, expected, rtol=0.01 if write is compiled_ddp else 0, atol=0
        )


def test_a_trainer_begins_with_them_at_step_0(tmp_path: Path) -> None:
    from lockstep import Trainer

    torch.manual_seed(1)
    elsewhere = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    torch.save(elsewhere.state_dict(), tmp_path / "model.pt")
    imported = checkpoint.import_weights(tmp_path / "model.pt", tmp_path / "imported")[0]
    mine = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    trainer = Trainer(mine, loss_fn=nn.MSELoss(), batch_size=4, max_steps=2)
    step, metadata = trainer.load_checkpoint(imported)
    assert (step, metadata) == (0, {"imported_from": str(tmp_path / "model.pt")})
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, elsewhere.state_dict()[name]), name
    records = list(
        trainer.steps(torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 1)))
    )
    assert [record.step for record in records] == [1, 2]


def test_exported_weights_come_back(tmp_path: Path, model: Tied) -> None:
    checkpoint.import_weights(accelerate(tmp_path, model), tmp_path / "one")
    checkpoint.export_safetensors(tmp_path / "one", tmp_path / "out.safetensors")
    checkpoint.import_weights(tmp_path / "out.safetensors", tmp_path / "two")
    assert checkpoint.digest(tmp_path / "one") == checkpoint.digest(tmp_path / "two")
    assert checkpoint.read_manifest(tmp_path / "two").parameters["embed.weight"].aliases == (
        "head.weight",
    )


class NoWeights:
    """What a restricted unpickler refuses."""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file or folder"),
        ({}, "there are no weights in"),
        ({"w.pt": NoWeights()}, "can't be read as weights"),
        (
            {"w.pt": {"state_dict": {"a": torch.ones(1), "lr": 0.1}}},
            "'lr', which is not the name of a tensor, among 2",
        ),
        ({"w.pt": [torch.ones(1)]}, "holds a list, where weights by name are needed"),
        ({"w.safetensors": b"no"}, "is not a safetensors file"),
        ({"model.safetensors.index.json": b"[]"}, "is not an index of weights"),
        (
            {"model.safetensors.index.json": b'{"weight_map": {"a": "../a"}}'},
            "outside of its folder",
        ),
    ],
)
def test_mistakes_are_told(tmp_path: Path, content: dict[str, Any] | None, message: str) -> None:
    source = tmp_path / "source"
    for name, value in (content or {}).items():
        source.mkdir(exist_ok=True)
        if isinstance(value, bytes):
            (source / name).write_bytes(value)
        else:
            torch.save(value, source / name)
    if content == {}:
        source.mkdir()
    (file,) = [source / name for name in content or {} if name.startswith("w.")] or [source]
    with pytest.raises(UsageError, match=message):
        run("import", file, output=tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_a_prefix_that_nothing_has_is_told(tmp_path: Path, model: Tied) -> None:
    with pytest.raises(
        UsageError, match=r"no name in .* begins with 'net\.'(.|\n)*it holds model\.embed\.weight"
    ):
        run("import", lightning(tmp_path, model), output=tmp_path / "imported", prefix="net.")


def damaged(data: bytes, chance: random.Random) -> bytes:
    """The file with a few bytes changed, a stretch cut out, or its end missing."""
    changed = bytearray(data)
    kind = chance.randrange(4)
    if kind == 0:
        return data[: chance.randrange(len(data))]
    start = chance.randrange(min(len(data), chance.choice((16, 1024, len(data)))))
    if kind == 1:
        del changed[start : start + chance.randrange(1, 64)]
    for _ in range(chance.randrange(1, 9) * (kind > 1)):
        changed[min(len(data) - 1, start + chance.randrange(64))] = chance.randrange(256)
    return bytes(changed)


def odd_indices() -> list[bytes]:
    odd: list[Any] = [
        {},
        [],
        1,
        None,
        {"a": 1},
        {"a": None},
        {"a": ""},
        {"a": ".."},
        {"a": "a\0b"},
        {"a": ["x"]},
    ]
    texts = [json.dumps({"weight_map": value}).encode() for value in odd]
    deep = [b"[" * 100_000, b'{"weight_map":' * 50_000]
    return [*texts, *deep, b"\xff\xfe", b"", b"Infinity", b'{"weight_map": {"a": NaN}}']


def odd_pickles() -> list[Any]:
    one = torch.ones(4)
    return [
        {1: one},
        {("a",): one},
        {"a": one.to_sparse()},
        {"a": torch.empty(3, device="meta")},
        {"a": torch.quantize_per_tensor(one, 0.1, 0, torch.qint8)},
        {"a": one[:1].expand(1 << 40)},
        {"module.a": one, "_orig_mod.module.a": one},
        {"a": torch.nested.nested_tensor([one])},
        {"a": {"b": one}},
        {"state_dict": {}},
        {"state_dict": 3},
        {"a": one.to(torch.float8_e4m3fn)},
        {"": one},
        {"a": torch.ones(0)},
    ]


def outcomes(source: Path, output: Path, found: Counter[str]) -> None:
    try:
        checkpoint.import_weights(source, output)
        assert checkpoint.verify(output) == []
        shutil.rmtree(output)
        found["imported"] += 1
    except LockstepError:
        found["refused"] += 1


@pytest.mark.fault(
    "hostile: weights of another trainer that are damaged or odd",
    "files cut, with other bytes, indices that are none, names that are not text, tensors that"
    " would grow in memory",
    "imported, or refused with one message; no traceback, and nothing is left behind",
)
def test_damaged_files_are_imported_or_refused_with_a_message(tmp_path: Path, model: Tied) -> None:
    """Whatever is wrong with a file, its reader says so; 490 files were tried, a sixth as many are
    here.
    """
    chance = random.Random(5)
    found = Counter[str]()
    folder = tmp_path / "source"
    output = tmp_path / "imported"
    folder.mkdir()
    for write in (lightning, accelerate, compiled_ddp):
        file = write(folder, model)
        file = file if file.is_file() else file / "model.safetensors"
        whole = file.read_bytes()
        for _ in range(20):
            file.write_bytes(damaged(whole, chance))
            outcomes(file, output, found)
    in_parts(folder, model)
    for text in odd_indices():
        (folder / "model.safetensors.index.json").write_bytes(text)
        outcomes(folder, output, found)
    for value in odd_pickles():
        torch.save(value, folder / "odd.pt")
        outcomes(folder / "odd.pt", output, found)
    for aliases in ("[", "[]", '{"a": 3}', "[" * 100_000, '{"embed.weight": [1]}'):
        save_file({"embed.weight": torch.ones(2)}, folder / "odd.safetensors", {"aliases": aliases})
        outcomes(folder / "odd.safetensors", output, found)
    assert found["refused"] > 40
    assert found["imported"] > 3
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
