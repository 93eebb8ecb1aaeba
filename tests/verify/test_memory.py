"""What a model remembers from one micro-batch to the next is found, and put back."""

import random
from collections import deque

import torch
from torch import Tensor, nn

from lockstep.verify.memory import ModelMemory

COUNT = {"calls": 0}
GENERATOR = torch.Generator().manual_seed(0)
PYTHON = random.Random(0)


class Remembering(nn.Module):
    """Has a counter, a queue, a buffer, and generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.past: deque[float] = deque(maxlen=2)
        self.register_buffer("seen", torch.zeros(()))
        self.inner = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        COUNT["calls"] += 1
        self.past.append(PYTHON.random())
        self.seen = self.seen + 1
        return x + COUNT["calls"] + sum(self.past) + torch.rand(1, generator=GENERATOR) + self.seen


def test_what_moves_is_found_and_put_back() -> None:
    model = Remembering()
    held = {"calls": 0}

    def hook(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
        held["calls"] += 1
        return output + held["calls"]

    model.register_forward_hook(hook)
    memory = ModelMemory([model])
    memory.restore_first()
    memory.begin()
    once = model(torch.zeros(1))
    moved = " ".join(memory.moved())
    for name in ("COUNT", "GENERATOR", "PYTHON", "past", "the buffer seen", "held"):
        assert name in moved
    assert "inner" not in moved
    assert model(torch.zeros(1)) != once
    memory.restore_first()
    assert model(torch.zeros(1)) == once
