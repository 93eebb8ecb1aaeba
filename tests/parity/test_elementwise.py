"""What the step computes of a summed gradient is the same on shards and on whole parameters, in
every bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from lockstep.errors import UsageError
from lockstep.models.transformer import Transformer
from lockstep.optim import _ELEMENTWISE, build_optimizer, unfuse
from lockstep.trainer import Trainer
from tests.ranks import run_ranks

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
            {"weight": torch.nn.Parameter(torch.ones(1))},
            learning_rate=1e-3,
            weight_decay=0.0,
            args={"fused": True},
            device=torch.device("cpu"),
            reproducible=True,
        )


def losses_with(kind: Any, strategy: str) -> list[float] | str:
    """Losses of three updates by an optimizer made over the model's own parameters; or a refusal.

    The refusal is an error before a step, or in the first one.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))
    optimizer = kind(model.parameters(), lr=0.05)
    data = TensorDataset(torch.randn(8, 4), torch.randn(8, 2))
    try:
        trainer = Trainer(
            model,
            optimizer,
            nn.MSELoss(),
            strategy=strategy,
            batch_size=2,
            global_batch_size=8,
            max_steps=3,
            reproducible=True,
        )
        return [float(record.loss) for record in trainer.steps(data)]
    except UsageError as error:
        return str(error)


def cut_with_adafactor() -> str:
    model = Transformer(n_layer=1, n_head=2, n_embd=8, vocab_size=16, block_size=8)
    ids = torch.arange(36).reshape(4, 9) % 16
    data = [{"input_ids": some[:, :-1], "targets": some[:, 1:]} for some in ids.split(2)]
    settings: dict[str, Any] = {"strategy": "tensor", "batch_size": 2, "max_steps": 1}
    with pytest.raises(UsageError) as caught:
        list(Trainer(model, torch.optim.Adafactor, **settings).steps(data))
    return str(caught.value)


def on_two_ranks() -> tuple[dict[str, list[float] | str], str]:
    kinds = (*_ELEMENTWISE, torch.optim.Rprop)
    return {kind.__name__: losses_with(kind, "fsdp") for kind in kinds}, cut_with_adafactor()


def test_they_train_shards_as_wholes_or_say_why_they_can_not() -> None:
    """Adagrad has state from its construction on; Rprop writes by a mask, which torch refuses, and
    Adafactor's norms are those of whole parameters.
    """
    sharded, adafactor = run_ranks(on_two_ranks, 2)[0]
    for kind in _ELEMENTWISE:
        found = sharded[kind.__name__]
        assert found == losses_with(kind, "single"), kind
    for name, said in (("Rprop", sharded["Rprop"]), ("Adafactor", adafactor)):
        assert f"{name} can't update parameters of which each rank holds a part" in said
