"""Weight files as people have them: each imports right, or the error says what to do."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep import Trainer
from lockstep.checkpoint import import_weights
from lockstep.errors import UsageError
from tests.ranks import run_ranks


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.middle = nn.Linear(4, 4)
        self.out = nn.Linear(4, 8, bias=False)
        self.out.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.out(self.middle(self.table(ids)))
        return scores


def built(seed: int) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def weights() -> dict[str, Tensor]:
    return {name: value.bfloat16().float() for name, value in built(1).state_dict().items()}


def without(*names: str) -> dict[str, Tensor]:
    return {name: value for name, value in weights().items() if name not in names}


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in weights().items()}


RIGHT: dict[str, Any] = {
    "both names": weights,
    "the first name": lambda: without("out.weight"),
    "the other": lambda: without("table.weight"),
    "apart": lambda: {name: value.clone() for name, value in weights().items()},
    "DDP": lambda: prefixed("module."),
    "compiled": lambda: prefixed("_orig_mod."),
    "both wrappers": lambda: prefixed("module._orig_mod."),
    "half": lambda: {name: value.to(torch.bfloat16) for name, value in weights().items()},
    "double": lambda: {name: value.double() for name, value in weights().items()},
    "state_dict": lambda: {"state_dict": weights(), "epoch": 3},
    "model": lambda: {"model": weights(), "step": 1},
    "model_state_dict": lambda: {"model_state_dict": weights()},
}
REFUSED: dict[str, tuple[Any, str]] = {
    "other values": (
        lambda: {**weights(), "out.weight": torch.zeros(8, 4)},
        "table.weight and out.weight are one parameter in the model, with two values in the file",
    ),
    "Lightning": (
        lambda: {"state_dict": prefixed("model.")},
        r"import the weights again with --prefix model\.",
    ),
    "extra": (
        lambda: {**weights(), "more": torch.ones(2)},
        "load what fits before the Trainer is made",
    ),
    "missing": (lambda: without("middle.bias"), "missing in the checkpoint: middle.bias"),
    "shape": (lambda: {**weights(), "middle.bias": torch.ones(5)}, r"stored \[5\], wanted \[4\]"),
    "envelope": (
        lambda: {"ema": weights()},
        r"torch\.save\(torch\.load\(FILE\)\['ema'\], ANOTHER\)",
    ),
}


def loaded(folder: str, strategy: str = "single") -> dict[str, Tensor]:
    trainer = Trainer(built(0), "sgd", nn.CrossEntropyLoss(), strategy=strategy)
    trainer.load_checkpoint(folder)
    return trainer.state_dict()


def imported(content: Any, folder: Path) -> str:
    torch.save(content, folder / "w.pt")
    return str(import_weights(folder / "w.pt", folder / "step-00000000")[0])


def equal(found: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, weights()[name]) for name, value in found.items())


@pytest.mark.parametrize("name", RIGHT)
def test_they_import_right(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert equal(loaded(imported(RIGHT[name](), tmp_path)))


def of_each(folders: list[str]) -> list[dict[str, Tensor]]:
    return [loaded(folder, "fsdp") for folder in folders]


def test_they_import_right_on_several_ranks(tmp_path: Path) -> None:
    folders = []
    for name in ("the other", "apart"):
        (tmp_path / name).mkdir()
        folders.append(imported(RIGHT[name](), tmp_path / name))
    assert all(equal(found) for found in run_ranks(of_each, 2, folders)[0])


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_says_what_to_do(name: str, tmp_path: Path) -> None:
    content, says = REFUSED[name]
    with pytest.raises(UsageError, match=says):
        loaded(imported(content(), tmp_path))


def test_the_prefix_that_is_named_makes_it_right(tmp_path: Path) -> None:
    torch.save(prefixed("model."), tmp_path / "w.pt")
    assert equal(
        loaded(
            str(import_weights(tmp_path / "w.pt", tmp_path / "step-00000000", prefix="model.")[0])
        )
    )


def test_values_that_are_no_numbers_are_told(tmp_path: Path) -> None:
    bad = {**weights(), "middle.bias": torch.tensor([1.0, float("nan"), 0.0, float("inf")])}
    with pytest.warns(UserWarning, match=r"not numbers \(nan or inf\), in middle\.bias"):
        imported(bad, tmp_path)
