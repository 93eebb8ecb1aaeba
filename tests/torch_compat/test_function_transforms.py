"""Code knows whether a transform of functions runs it."""

import torch
from torch import Tensor
from torch.func import grad, vmap

from lockstep.torch_compat.function_transforms import is_transforming


def test_transforms_are_known() -> None:
    seen = []

    def square(x: Tensor) -> Tensor:
        seen.append(is_transforming())
        return x.square().sum()

    square(torch.ones(2))
    grad(square)(torch.ones(2))
    vmap(square)(torch.ones(2, 2))
    assert seen == [False, True, True]
    assert not is_transforming()
