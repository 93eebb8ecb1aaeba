"""Models whose `state_dict` is not simply their tensors: parametrizations, hooks, overridden
methods, further state.

Right is plain PyTorch: the values that are trained, what a run resumes from, and a `state_dict`
both ways.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Trainer
from lockstep.checkpoint import import_weights, weights
from lockstep.errors import UsageError
from tests.ranks import run_ranks

WIDTH = 6


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.triu()


class Counted(nn.Linear):
    """Keeps a number beside its weights, on which its outputs depend."""

    factor = 1.0

    def get_extra_state(self) -> Any:
        return {"factor": self.factor}

    def set_extra_state(self, state: Any) -> None:
        self.factor = state["factor"]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


class Halved(nn.Linear):
    """In a state, weights have the same name and shape and other values, and a buffer has another
    name.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("centre", torch.randn(inputs))
        self.register_state_dict_post_hook(self._halve)

    @staticmethod
    def _halve(_module: nn.Module, state: dict[str, Any], prefix: str, _local: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] / 2
        state[f"{prefix}mean"] = state.pop(f"{prefix}centre")

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *more: Any) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        state[f"{prefix}centre"] = state.pop(f"{prefix}mean")
        super()._load_from_state_dict(state, prefix, *more)  # type: ignore[no-untyped-call]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - self.get_buffer("centre"))


def chain(layer: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), layer(), nn.Tanh(), layer(), nn.Linear(WIDTH, 1)
    )


def linear(change: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    return change(nn.Linear(WIDTH, WIDTH))


def counted() -> nn.Module:
    layer = Counted(WIDTH, WIDTH)
    layer.factor = float(torch.rand(()))
    return layer


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: linear(parametrizations.weight_norm),
    "weight norm with hooks": lambda: linear(nn.utils.weight_norm),
    "spectral norm": lambda: linear(parametrizations.spectral_norm),
    "spectral norm with hooks": lambda: linear(nn.utils.spectral_norm),
    "orthogonal": lambda: linear(parametrizations.orthogonal),
    "symmetric": lambda: linear(
        lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric())
    ),
    "extra state": counted,
    "a hook and a method": lambda: Halved(WIDTH, WIDTH),
}
QUICK = ("weight norm with hooks", "a hook and a method")


def built(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return chain(MODELS[name])


def data() -> TensorDataset:
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


sgd = functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def plain(name: str) -> dict[str, Any]:
    model = built(name, 0)
    x, y = data().tensors
    optimizer = sgd(model.parameters())
    for rows in (slice(8), slice(8, 16), slice(16, 24)):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return dict(model.state_dict())


def ways(name: str, strategy: str, folder: str) -> dict[str, Mapping[str, Any]]:
    """Return states of a model: trained, trained with a resume, loaded from a plain state in two
    ways.
    """
    settings: Any = {
        "strategy": strategy,
        "batch_size": 4,
        "global_batch_size": 8,
        "shuffle": False,
    }
    trainer = Trainer(built(name, 0), sgd, nn.MSELoss(), **settings)
    saved = f"{folder}/{name}-{strategy}"
    for record in trainer.steps(data()):
        if record.step == 1:
            trainer.save_checkpoint(saved)
    found: dict[str, Mapping[str, Any]] = {"trained": trainer.state_dict()}
    resumed = Trainer(built(name, 1), sgd, nn.MSELoss(), **settings)
    resumed.load_checkpoint(saved)
    list(resumed.steps(data()))
    found["resumed"] = resumed.state_dict()
    placed = lockstep.place(built(name, 1), strategy, nn.MSELoss())
    placed.load_state_dict(dict(built(name, 0).state_dict()))
    found["loaded"] = placed.state_dict()
    if Path(folder, name).exists():
        imported = Trainer(built(name, 1), sgd, nn.MSELoss(), **settings)
        imported.load_checkpoint(f"{folder}/{name}")
        found["imported"] = imported.state_dict()
    return found


def all_ways(cases: list[tuple[str, str]], folder: str) -> list[dict[str, Mapping[str, Any]]]:
    return [ways(*case, folder) for case in cases]


def assert_equal(found: Mapping[str, Any], right: Mapping[str, Any], case: Any) -> None:
    assert set(found) == set(right), case
    for name, value in right.items():
        if isinstance(value, Tensor):
            assert torch.allclose(found[name], value, atol=2e-6), (case, name)
        else:
            assert found[name] == value, (case, name)


STRATEGIES = ("ddp", "fsdp", "pipeline")


def assert_right(
    names: Sequence[str], folder: Path, strategies: Sequence[str] = STRATEGIES
) -> None:
    for name in names:
        state = built(name, 0).state_dict()
        if all(isinstance(value, Tensor) for value in state.values()):
            torch.save(state, folder / "w.pt")
            import_weights(folder / "w.pt", folder / name)
    cases = [(name, strategy) for name in names for strategy in strategies]
    alone = [(name, "single") for name in names]
    every = [*all_ways(alone, str(folder)), *run_ranks(all_ways, 2, cases, str(folder))[0]]
    for (name, strategy), states in zip([*alone, *cases], every, strict=True):
        trained = plain(name)
        first = dict(built(name, 0).state_dict())
        for way, state in states.items():
            assert_equal(
                state, trained if way in ("trained", "resumed") else first, (name, strategy, way)
            )


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_states_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    assert_right(QUICK, tmp_path, STRATEGIES[1:])


@pytest.mark.full
def test_states_under_ddp_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    assert_right(QUICK, tmp_path, STRATEGIES[:1])


@pytest.mark.full
def test_states_of_other_models_are_those_of_plain_pytorch(tmp_path: Path) -> None:
    assert_right([name for name in MODELS if name not in QUICK], tmp_path)


def test_tensors_by_their_own_names_are_told(tmp_path: Path) -> None:
    trainer = Trainer(built("a hook and a method", 0), sgd, nn.MSELoss())
    with pytest.warns(UserWarning, match="a hook or a method of 2, 4 makes the model's state_dict"):
        found = weights(trainer.save_checkpoint(tmp_path))
    assert "2.centre" in found


class Held(nn.Linear):
    """Keeps a tensor where a checkpoint has JSON."""

    def get_extra_state(self) -> Any:
        return torch.ones(2)

    def set_extra_state(self, state: Any) -> None:
        """Forget it."""


def test_state_that_a_checkpoint_can_not_hold_is_refused() -> None:
    with pytest.raises(UsageError, match="get_extra_state of 0 returns what JSON can't hold"):
        Trainer(nn.Sequential(Held(2, 2)), sgd, nn.MSELoss())


class WrittenOnly(nn.Linear):
    """Has state beside its tensors, which nothing gives back."""

    def get_extra_state(self) -> Any:
        return 1


def test_state_that_nothing_gives_back_is_refused() -> None:
    with pytest.raises(UsageError, match="has get_extra_state and no set_extra_state"):
        Trainer(nn.Sequential(WrittenOnly(2, 2)), sgd, nn.MSELoss())


def test_a_file_with_state_beside_its_tensors_says_how_it_is_loaded(tmp_path: Path) -> None:
    torch.save(built("extra state", 0).state_dict(), tmp_path / "w.pt")
    with pytest.raises(UsageError, match=r"model\.load_state_dict\(torch\.load\(FILE\)\)"):
        import_weights(tmp_path / "w.pt", tmp_path / "step-00000000")
