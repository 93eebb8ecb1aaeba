"""What the step computes of a summed gradient is the same on shards and on whole parameters, in
every bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from lockstep.errors import UsageError
from lockstep.optim import _ELEMENTWISE, build_optimizer, unfuse

CUTS: list[list[int]] = [
    [1],
    [7],
    [519],
    [3, 260, 261, 777],
    [100, 200, 300, 400, 500, 600, 700, 800, 900, 1000],
]


def trained(
    make: Callable[[list[torch.nn.Parameter]], Optimizer], cuts: Sequence[int]
) -> torch.Tensor:
    """20 updates of 1037 elements that are cut as a sharded parameter would be."""
    generator = torch.Generator().manual_seed(0)
    pieces = torch.tensor_split(torch.randn(1037, generator=generator), list(cuts))
    parameters = [torch.nn.Parameter(piece.clone()) for piece in pieces]
    optimizer = make(parameters)
    for _ in range(20):
        sizes = 10.0 ** torch.randint(-6, 2, (1037,), generator=generator)
        gradient = torch.randn(1037, generator=generator) * sizes
        for parameter, piece in zip(
            parameters, torch.tensor_split(gradient, list(cuts)), strict=True
        ):
            parameter.grad = piece.clone()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


@pytest.mark.parametrize("kind", sorted(_ELEMENTWISE, key=lambda k: k.__name__))
@pytest.mark.parametrize("foreach", [True, False])
def test_optimizers_that_may_be_sharded_update_shards_as_wholes(kind: Any, foreach: bool) -> None:
    def make(parameters: list[torch.nn.Parameter]) -> Optimizer:
        optimizer: Optimizer = kind(parameters, lr=1e-2, foreach=foreach)
        return optimizer

    whole = trained(make, [])
    assert all(torch.equal(trained(make, cuts), whole) for cuts in CUTS)


def test_fused_kernels_are_switched_off_because_they_round_shards_differently() -> None:
    def fused(parameters: list[torch.nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2, fused=True)

    def unfused(parameters: list[torch.nn.Parameter]) -> Optimizer:
        optimizer = fused(parameters)
        assert unfuse(optimizer)
        assert not unfuse(optimizer)
        return optimizer

    assert not all(torch.equal(trained(fused, cuts), trained(fused, [])) for cuts in CUTS)
    assert all(torch.equal(trained(unfused, cuts), trained(unfused, [])) for cuts in CUTS)


def test_fused_is_refused_where_the_config_asks_for_it() -> None:
    with pytest.raises(UsageError, match="fused"):
        build_optimizer(
            "adamw",
            [torch.nn.Parameter(torch.ones(1))],
            learning_rate=1e-3,
            weight_decay=0.0,
            args={"fused": True},
            device=torch.device("cpu"),
            reproducible=True,
        )
