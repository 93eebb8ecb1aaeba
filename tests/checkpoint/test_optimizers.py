"""An optimizer's state by name: into a fresh optimizer, whatever the order of its parameters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from lockstep import checkpoint
from lockstep.checkpoint import Snapshot
from lockstep.errors import UsageError

Make = Callable[[list[dict[str, Any]]], Optimizer]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def groups(module: nn.Module, *, reverse: bool = False) -> list[dict[str, Any]]:
    decayed = [p for p in module.parameters() if p.ndim > 1]
    rest = [p for p in module.parameters() if p.ndim <= 1]
    if reverse:
        decayed.reverse()
        rest.reverse()
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def train(module: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()


def names(module: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.AdamW(params, lr=0.01),
        lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True, foreach=True),
        lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
        lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), capturable=False),
        lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
        lambda params: torch.optim.SGD(params, lr=0.01),
        lambda params: torch.optim.Adagrad(params, lr=0.01),
        lambda params: torch.optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
        lambda params: torch.optim.NAdam(params, lr=0.01),
        lambda params: torch.optim.Adafactor(params, lr=0.01),
        lambda params: torch.optim.ASGD(params, lr=0.01),
    ],
)
def test_going_on_is_as_if_never_stopped(make: Make, tmp_path: Path) -> None:
    straight = model()
    optimizer = make(groups(straight))
    train(straight, optimizer, range(3))
    for group in optimizer.param_groups:  # as a schedule does
        group["lr"] = group["lr"] * 0.5
    tensors, stored = checkpoint.optimizer_state(optimizer, names(straight))
    before = Snapshot(dict(straight.named_parameters()), {"main": tensors}, groups={"main": stored})
    path = checkpoint.save(tmp_path, 3, before, config_yaml="")
    train(straight, optimizer, range(3, 6))

    resumed = model()
    fresh = make(groups(resumed, reverse=True))
    parameters = dict(resumed.named_parameters())
    assert checkpoint.optimizers_in(path) == ["main"]
    target = Snapshot(
        dict(parameters), {"main": checkpoint.optimizer_targets(path, "main", parameters)}
    )
    state = checkpoint.load(path, target)
    checkpoint.restore_optimizer(
        fresh, names(resumed), target.optimizers["main"], state["optimizer_groups"]["main"]
    )
    train(resumed, fresh, range(3, 6))
    for mine, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(mine, other)
    options = [{k: v for k, v in group.items() if k != "params"} for group in fresh.param_groups]
    assert options == [
        {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
    ]
    assert type(fresh.param_groups[0].get("betas", ())) is tuple


def test_the_json_part_lists_groups_by_name() -> None:
    module = model()
    optimizer = torch.optim.AdamW(groups(module), lr=0.01)
    train(module, optimizer, range(1))
    tensors, stored = checkpoint.optimizer_state(optimizer, names(module))
    assert [group["params"] for group in stored["groups"]] == [
        ["0.weight", "2.weight"],
        ["0.bias", "2.bias"],
    ]
    assert stored["groups"][0]["options"]["betas"] == [0.9, 0.999]
    assert set(tensors) == {
        f"{name}//{key}"
        for name in ("0.weight", "0.bias", "2.weight", "2.bias")
        for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_trap_48_a_dead_parameter_is_told() -> None:
    """An optimizer made before the model was placed holds parameters that nothing trains."""
    module = model()
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    with pytest.raises(UsageError, match="does not have"):
        checkpoint.optimizer_state(optimizer, names(module))


def test_other_groups_are_refused() -> None:
    module = model()
    _, stored = checkpoint.optimizer_state(torch.optim.SGD(groups(module), lr=0.1), names(module))
    with pytest.raises(UsageError, match="1 parameter groups, the checkpoint 2"):
        checkpoint.restore_optimizer(
            torch.optim.SGD(module.parameters(), lr=0.1), names(module), {}, stored
        )
    swapped = torch.optim.SGD(list(reversed(groups(module))), lr=0.1)
    with pytest.raises(UsageError, match=r"0\.bias is in group 0 of the optimizer, and in group 1"):
        checkpoint.restore_optimizer(swapped, names(module), {}, stored)


def test_trap_75_the_kernels_of_a_checkpoint_are_not_taken_over() -> None:
    """One process updates with a fused kernel; shards, which may go on from its checkpoint, have
    none for SGD.
    """
    module = model()
    saved = torch.optim.SGD(groups(module), lr=0.1, momentum=0.5, fused=True)
    _, stored = checkpoint.optimizer_state(saved, names(module))
    plain = torch.optim.SGD(groups(module), lr=0.2, foreach=False)
    checkpoint.restore_optimizer(plain, names(module), {}, stored)
    [(momentum, fused, foreach)] = {
        (g["momentum"], g["fused"], g["foreach"]) for g in plain.param_groups
    }
    assert (momentum, fused, foreach) == (0.5, None, False)


def test_nested_state_is_refused_not_dropped() -> None:
    module = model()
    optimizer = torch.optim.LBFGS(module.parameters())
    x = torch.ones(2, 4)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = module(x).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(UsageError, match="JSON can't hold"):
        checkpoint.optimizer_state(optimizer, names(module))
