"""What hangs on parameters and modules survives placement: optimizer groups are chosen by it."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import Trainer
from lockstep.errors import UsageError
from lockstep.models import get_model
from tests.ranks import run_ranks


def built() -> nn.Sequential:
    """A model in which a factor of the learning rate hangs on weights, and a flag on biases."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 1))
    for place, (name, parameter) in enumerate(model.named_parameters()):
        parameter.rate_factor = 1.0 + place  # type: ignore[attr-defined]
        if name.endswith("bias"):
            parameter.no_decay = True  # type: ignore[attr-defined]
    return model


def by_attributes(parameters: Any) -> torch.optim.Optimizer:
    groups = [
        {
            "params": [p],
            "lr": 0.01 * p.rate_factor,
            "weight_decay": 0.0 if getattr(p, "no_decay", False) else 0.3,
        }
        for p in parameters
    ]
    return torch.optim.SGD(groups)


def data() -> TensorDataset:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.sum(1, keepdim=True))


def trained(strategies: list[str]) -> list[dict[str, Tensor]]:
    found = []
    for strategy in strategies:
        settings: Any = {
            "strategy": strategy,
            "batch_size": 4,
            "global_batch_size": 8,
            "shuffle": False,
        }
        trainer = Trainer(built(), by_attributes, nn.MSELoss(), **settings)
        list(trainer.steps(data()))
        found.append(trainer.state_dict())
    return found


def plain() -> dict[str, Tensor]:
    model = built()
    x, y = data().tensors
    optimizer = by_attributes(model.parameters())
    for rows in (slice(8), slice(8, 16)):
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in model.state_dict().items()}


def test_groups_by_attributes_are_those_of_plain_pytorch() -> None:
    expected = plain()
    for state in [
        *trained(["single", "dp"]),
        *run_ranks(trained, 2, ["ddp", "fsdp", "pipeline"])[0],
    ]:
        assert all(
            torch.allclose(state[name], value, atol=1e-6) for name, value in expected.items()
        )


def of_texts() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = get_model("transformer")(
        vocab_size=32, block_size=8, n_embd=16, n_head=4, n_layer=1
    )
    return model


NORMS = {"its own": nn.utils.parametrizations.weight_norm, "with hooks": nn.utils.weight_norm}


def normed(how: str) -> nn.Module:
    model = of_texts()
    NORMS[how](model.get_submodule("layers.0.attention.query"))
    return model


def with_cut_layers() -> list[Any]:
    for how in NORMS:
        with pytest.raises(
            UsageError,
            match=r"layers\.0\.attention\.query\.weight is computed from other parameters",
        ):
            lockstep.place(normed(how), strategy="tensor")
    model = of_texts()
    for name, parameter in model.named_parameters():
        parameter.own_name = name
    placed = lockstep.place(model, strategy="tensor")
    return [
        (name, getattr(parameter, "own_name", None))
        for name, parameter in placed.named_parameters()
    ]


def test_attributes_survive_where_layers_are_cut() -> None:
    for found in run_ranks(with_cut_layers, 2):
        assert found
        assert all(name == own for name, own in found)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize("how", NORMS)
def test_parametrized_layers_train_the_same_where_bits_count(how: str) -> None:
    """`reproducible` computes layers in blocks, as if they were cut, where the plan allows it."""
    ids = torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(1))
    batches = [{"input_ids": ids[:, :-1], "targets": ids[:, 1:]}]
    losses = []
    for reproducible in (False, True):
        settings: Any = {"batch_size": 4, "max_steps": 2, "reproducible": reproducible}
        trainer = Trainer(normed(how), "sgd", learning_rate=0.1, **settings)
        losses.append([float(record.loss) for record in trainer.steps(batches)])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def hooked(strategy: str, where: str) -> int:
    """Return how often a hook on a module has run."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model = built()
    (model if where == "root" else model[3]).register_forward_hook(count)
    settings: Any = {"strategy": strategy, "batch_size": 4, "global_batch_size": 8}
    trainer = Trainer(model, "sgd", nn.MSELoss(), **settings)
    trainer.loss_check.skip()
    next(trainer.steps(data()))
    return calls


def hooks_of_all() -> list[int]:
    with pytest.raises(UsageError, match="Sequential has a hook that a pipeline does not call"):
        hooked("pipeline", "root")
    return [
        hooked("ddp", "root"),
        hooked("fsdp", "root"),
        hooked("fsdp", "last"),
        hooked("pipeline", "last"),
    ]


def test_hooks_on_modules_run_or_are_refused() -> None:
    first, last = run_ranks(hooks_of_all, 2)
    assert first[:3] == last[:3] == [1, 1, 1]  # of two micro-batches each rank runs one
    assert last[3] >= 2
