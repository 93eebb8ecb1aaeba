"""A model that sleeps instead of computing, so that a machine can run more ranks than it has cores.

    model: {name: "benchmarks.sleeping:Sleeper", args: {milliseconds: 20}}
    data:  {name: "benchmarks.sleeping:SleepSamples"}

A sample sleeps for a third of its time in forward and two thirds in backward; the gradients are
real, and are reduced.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Sleeper(nn.Module):
    """Two square layers around a sleep: `milliseconds` for a sample's forward and backward."""

    def __init__(self, milliseconds: float = 5.0, n_embd: int = 64) -> None:
        super().__init__()
        self.seconds = milliseconds / 1000
        self.first = nn.Linear(n_embd, n_embd, bias=False)
        self.second = nn.Linear(n_embd, n_embd, bias=False)

    def init_weights(self) -> None:
        """Fill the parameters."""
        for layer in (self.first, self.second):
            nn.init.normal_(layer.weight, std=0.02)

    def inputs(self, batch: dict[str, Tensor]) -> tuple[Tensor]:
        """Return the inputs of a batch."""
        return (batch["x"],)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layers and sleep."""
        slept = _Sleep.apply(self.first(x), self.seconds * len(x))  # type: ignore[no-untyped-call]
        result: Tensor = self.second(slept)
        return result

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return the sum of the samples' squared errors."""
        return (outputs - batch["x"]).float().square().mean(dim=1).sum()

    def count(self, batch: dict[str, Tensor]) -> int:
        """Return the number of samples."""
        return len(batch["x"])


class SleepSamples(Dataset[dict[str, Tensor]]):
    """Constant samples for `Sleeper`."""

    deterministic = True

    def __init__(self, samples: int = 100_000, n_embd: int = 64) -> None:
        self._samples = samples
        self._width = n_embd

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.full((self._width,), index % 7 / 7)}


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds * 2 / 3)
        return gradients[0], None
