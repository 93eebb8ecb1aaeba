"""Modules that never draw random numbers get no key; whatever may draw gets the key that it had."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.drawless import DRAWLESS, is_run_by_torch, never_draws
from lockstep.randomness import RandomState, key_segments
from lockstep.torch_compat.module_hooks import forward_pre_hooks

# Modules of torch whose forward pass draws, or draws with some settings.
DRAWING = {
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout),
    *(nn.FeatureAlphaDropout, nn.RReLU, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d),
    *(nn.MultiheadAttention, nn.RNN, nn.LSTM, nn.GRU, nn.Transformer),
    *(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer),
}


def test_drawless_classes_are_torchs_and_their_code_draws_nothing() -> None:
    assert not DRAWLESS & DRAWING
    for kind in DRAWLESS:
        assert kind.__module__.startswith("torch.nn.modules."), kind
        forward = inspect.getsource(kind.forward)
        assert "dropout" not in forward, kind
        assert "rand" not in forward, kind


MADE: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Linear(4, 4), torch.randn(2, 4)),
    "conv": lambda: (nn.Conv2d(2, 2, 3), torch.randn(1, 2, 5, 5)),
    "norms": lambda: (nn.Sequential(nn.LayerNorm(4), nn.BatchNorm1d(4)), torch.randn(2, 4)),
    "embedding": lambda: (nn.Embedding(4, 4, max_norm=1.0), torch.tensor([1, 2])),
    "activations": lambda: (
        nn.Sequential(nn.GELU(), nn.SiLU(), nn.PReLU(), nn.Softmax(-1)),
        torch.randn(2, 4),
    ),
    "pools": lambda: (nn.Sequential(nn.MaxPool1d(2), nn.AdaptiveAvgPool1d(1)), torch.ones(1, 2, 8)),
}


@pytest.mark.parametrize("name", MADE)
def test_a_drawless_module_leaves_the_generator_alone(name: str) -> None:
    module, x = MADE[name]()
    assert never_draws(module)
    before = torch.get_rng_state()
    module.train()
    if x.is_floating_point():
        x.requires_grad_()
    module(x).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


class Own(nn.Linear):
    """A subclass may do anything."""


class Weight(torch.Tensor):
    """Operations on it may do anything."""


def with_weight() -> nn.Module:
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Weight))
    return linear


def with_attribute(name: str) -> nn.Module:
    linear = nn.Linear(2, 2)
    setattr(linear, name, torch.rand_like)
    return linear


def with_hook(kind: str) -> nn.Module:
    linear = nn.Linear(2, 2)
    getattr(linear, f"register_{kind}")(lambda *_: None)
    return linear


@pytest.mark.parametrize(
    "module",
    [
        nn.Dropout(0.0),
        nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)),
        Own(2, 2),
        nn.Sequential(Own(2, 2)),
        with_weight(),
        with_attribute("forward"),
        with_attribute("noise"),
        *map(
            with_hook,
            ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"),
        ),
    ],
    ids=lambda module: type(module).__name__,
)
def test_what_may_draw_is_not_drawless(module: nn.Module) -> None:
    assert not never_draws(module)


def test_hooks_on_all_modules_may_draw() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not never_draws(nn.Linear(2, 2))
    finally:
        handle.remove()
    assert never_draws(nn.Linear(2, 2))


class Between(nn.Sequential):
    """Draws between its members."""

    def forward(self, x: Tensor) -> Tensor:
        for member in self:
            x = member(x) + torch.rand_like(x)
        return x


class Named(nn.Sequential):
    """Runs as its parent does."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 2))


def test_a_chain_of_ones_own_may_draw_between_its_members() -> None:
    assert is_run_by_torch(nn.Sequential())
    assert is_run_by_torch(Named())
    assert not is_run_by_torch(Between())
    assert not is_run_by_torch(nn.ModuleList())
    patched = nn.Sequential()
    patched.forward = torch.rand_like  # type: ignore[method-assign]
    assert not is_run_by_torch(patched)


def noise(*_: Any) -> Tensor:
    return torch.rand(())


def chain() -> nn.Sequential:
    shared = nn.ReLU()
    return nn.Sequential(
        nn.Linear(8, 8), shared, nn.Dropout(0.5), nn.Linear(8, 8), nn.RReLU(), shared
    )


def drawn(model: nn.Sequential, *, is_sequential: bool, late: str = "") -> list[Any]:
    """Outputs of two steps and what the loss and the backward pass would draw after them."""
    found: list[Any] = []
    random_state = RandomState(3, torch.device("cpu"))
    names = [(str(index), module) for index, module in enumerate(model)]
    key_segments(random_state, names, chain=True, is_sequential=is_sequential)
    for step in range(2):
        with random_state.running("train", step):
            for micro_batch in range(2):
                random_state.at(micro_batch)
                found += [model(torch.ones(4, 8)), torch.rand(3)]
        if late == "hook":
            model[3].register_forward_hook(lambda _m, _a, output: output + noise())
        if late == "forward":
            model[3].forward = lambda x: x + noise()  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("late", ["", "hook", "forward"])
def test_without_needless_keys_the_same_numbers_are_drawn(late: str) -> None:
    """A shared module that is the last segment, too, keeps all its keys: the loss draws from it."""
    torch.manual_seed(0)
    every_key = chain()
    few_keys = chain()
    few_keys.load_state_dict(every_key.state_dict())
    expected = drawn(every_key, is_sequential=False, late=late)
    found = drawn(few_keys, is_sequential=True, late=late)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
    keyed = [len(list(forward_pre_hooks(module))) for module in few_keys]
    assert keyed == ([1, 2, 1, 1, 1, 2] if late else [0, 2, 1, 0, 1, 2])
