"""A chain that torch's tracer makes computes what the model computes, in every bit, with its parameters."""

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import UsageError
from lockstep.models.traced import trace
from tests.parity.pipelines import NoChain
from tests.parity.toy import VOCAB


def ids(samples: int) -> Tensor:
    return torch.randint(0, VOCAB, (samples, 12))


@pytest.mark.parametrize("training", [True, False])
def test_a_traced_model_computes_the_same(training: bool) -> None:
    """Any number of samples; dropout in training and none in evaluation."""
    model = NoChain()
    chain = trace(model, ids(2)).train(training)
    model.train(training)
    assert [name for name, _ in chain.segments()] == ["inputs", *(f"layers.{i}" for i in range(7)), "outputs"]
    assert [n for n, _ in chain.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert set(chain.state_dict()) == set(model.state_dict())
    for samples in (2, 5, 1):
        batch = ids(samples)
        results = []
        for each in (model, chain):
            torch.manual_seed(1)
            model.zero_grad()
            outputs = each(batch)
            outputs.square().sum().backward()
            results.append((outputs, [p.grad.clone() for p in model.parameters() if p.grad is not None]))
        (one, gradients), (other, others) = results
        assert torch.equal(one, other)
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(gradients, others, strict=True))


class Running(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Branching(Running):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x) if x.sum() > 0 else x


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.layers[0](x)}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Running, "changes buffers in its forward pass: layers.0.1"),
        (Branching, "torch can't export Branching"),
        (Dictionary, "Dictionary returns something else than a tensor"),
        (lambda: nn.Linear(4, 4), "no repeated blocks"),
    ],
)
def test_what_can_not_be_traced_is_said(model: type[nn.Module], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        trace(model(), torch.randn(3, 4))
