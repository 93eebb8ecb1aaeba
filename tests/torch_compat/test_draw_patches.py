"""`lockstep/torch_compat/draw_patches.py`: draws are seen, from whichever generator."""

import random
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.torch_compat.draw_patches import patch_draws
from lockstep.torch_compat.replaced_calls import patch_names
from tests.ranks import run_ranks


def test_draws_are_seen_and_have_the_numbers_that_they_had() -> None:
    (found,) = run_ranks(drawn, 1)
    assert found == [
        "random.shuffle",  # which another module has imported before
        "random.randint",  # which calls randrange
        "numpy.random.rand",
        "numpy.random.normal",
        "numpy.random.shuffle",
    ]


def noise(x: Tensor) -> Tensor:
    return x + torch.rand(2)


def more_noise(x: Tensor) -> Tensor:
    return x * torch.rand(2)


def drawn() -> list[str]:
    before = ModuleType("before")
    sys.modules["before"] = before
    vars(before).update(shuffle=random.shuffle, old=np.random.RandomState(0))
    expected = [np.random.RandomState(3).rand(), np.random.Generator(np.random.PCG64(3)).normal()]
    found: list[str] = []

    def draw(name: str, call: Any) -> Any:
        found.append(name)
        return call()

    torch.jit.script(noise)  # type: ignore[no-untyped-call]  # the operators are known from now on
    patch_draws(draw)
    patch_names()
    scripted = torch.jit.script(more_noise)  # type: ignore[no-untyped-call]
    assert scripted(torch.zeros(2)).shape == (2,)  # as torch scripts its functional optimizers
    before.shuffle([1, 2])
    random.Random(3).randint(0, 5)
    values = [np.random.RandomState(3).rand(), np.random.Generator(np.random.PCG64(3)).normal()]
    assert values == expected
    np.random.default_rng(0).shuffle([1, 2])
    assert isinstance(before.old, np.random.RandomState)  # as libraries ask
    return found
