"""Known tensors, and the checkpoints made of them, for the tests of this folder."""

import zlib
from pathlib import Path

import torch
from torch import Tensor

from lockstep import checkpoint
from lockstep.checkpoint import Snapshot

SHAPES = {
    "blocks.0.weight": (10, 6),  # does not divide by 4
    "blocks.0.bias": (3,),  # fewer rows than 4 ranks: one holds nothing
    "blocks.1.weight": (8, 4),
    "head.weight": (5, 7),
}
CONFIG = "model: {name: example}\n"


def known(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """The same values for the same name, in every process."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator).to(dtype)


def known_model() -> dict[str, Tensor]:
    model = {name: known(name, shape) for name, shape in SHAPES.items()}
    model["norm"] = known("norm", (9,), torch.bfloat16)
    model["count"] = torch.tensor(7)
    return model


def snapshot(shift: float = 0.0) -> Snapshot:
    """A whole run's state in one process, tied names included."""
    model = {
        name: tensor + shift if tensor.is_floating_point() else tensor
        for name, tensor in known_model().items()
    }
    model["tied.weight"] = model["head.weight"]
    adam = {
        "head.weight//exp_avg": known("exp_avg", (5, 7)) + shift,
        "head.weight//step": torch.tensor(3.0 + shift),
    }
    return Snapshot(
        model,
        {"main": adam, "plain_sgd": {}},
        {
            "step": 3,
            "loss": 0.1 + shift,
            "scaler": {"scale": 65536.0, "none": None},
            "skipped": [1, 2],
        },
        {"ema": {"head.weight": known("ema", (5, 7)) + shift}},
    )


def blank(like: Snapshot) -> Snapshot:
    """The same names and shapes, with zeros in them and the ties kept."""
    zeros: dict[int, Tensor] = {}

    def clear(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: zeros.setdefault(id(tensor), torch.zeros_like(tensor))
            for name, tensor in tensors.items()
        }

    return Snapshot(
        clear(like.model),
        {name: clear(tensors) for name, tensors in like.optimizers.items()},
        {},
        {name: clear(tensors) for name, tensors in like.extra.items()},
    )


def assert_same(first: Snapshot, second: Snapshot) -> None:
    """Equal in every bit: tensors, names, dtypes."""
    pairs = [(first.model, second.model), *((first.extra[n], second.extra[n]) for n in first.extra)]
    pairs += [(first.optimizers[n], second.optimizers[n]) for n in first.optimizers]
    for mine, theirs in pairs:
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert mine[name].dtype == theirs[name].dtype
            assert torch.equal(mine[name], theirs[name]), name


def save(directory: Path, step: int, shift: float = 0.0) -> Path:
    return checkpoint.save(directory, step, snapshot(shift), config_yaml=CONFIG)


def flip(path: Path, position: int) -> None:
    """One bit of one byte, as a bad disk would."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
