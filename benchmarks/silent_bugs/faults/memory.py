"""Faults of random numbers, and of what a model remembers from one micro-batch to the next."""

import os
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.silent_bugs.faults.models import WIDTH, Block, Net, net
from benchmarks.silent_bugs.faults.registry import fault
from lockstep.machine.environment import rank_facts
from lockstep.trainer import Trainer
from lockstep.verify import Subject


@fault("random numbers", names="rank 1")
def another_seed_on_rank_1() -> Subject:
    def prepare(trainer: Trainer) -> None:
        trainer.placed.random_state.seed += rank_facts().rank

    return net(prepare=prepare)


GENERATOR = torch.Generator().manual_seed(0)


@fault("memory", names="GENERATOR")
def own_generator_of_the_module() -> Subject:
    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.1 * torch.randn(x.shape, generator=GENERATOR))

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Noisy()
    return net(model)


NUMPY = np.random.default_rng(0)


@fault("memory", names="NUMPY")
def numpy_generator_in_forward() -> Subject:
    class Scaled(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * float(1 + 0.2 * NUMPY.random())

    return net(Scaled())


PYTHON = random.Random(0)


@fault("memory", names="PYTHON")
def python_generator_in_forward() -> Subject:
    class Dropping(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * (0.5 if PYTHON.random() < 0.5 else 1.0)

    return net(Dropping())


@fault("non-deterministic operation", names="blocks.0|model|embed")
def numbers_from_the_operating_system() -> Subject:
    model = Net()

    def noisy(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output * (1 + int.from_bytes(os.urandom(2), "little") / 2**18)

    model.blocks[0].register_forward_hook(noisy)
    return net(model)


STEPS = {"seen": 0}


@fault("memory", names="STEPS")
def counter_of_the_module() -> Subject:
    class Warming(Net):
        def forward(self, ids: Tensor) -> Tensor:
            STEPS["seen"] += 1
            return super().forward(ids) * min(1.0, 0.2 * STEPS["seen"])

    return net(Warming())


QUEUE: deque[Tensor] = deque(maxlen=2)


@fault("memory", names="QUEUE")
def queue_of_earlier_micro_batches() -> Subject:
    class Remembering(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            past = sum(QUEUE) / len(QUEUE) if QUEUE else 0.0
            QUEUE.append(y.detach().mean())
            return y + past

    model = Net()
    torch.manual_seed(1)
    model.blocks[1] = Remembering()
    return net(model)


@fault("memory", "buffer", "refused", names="seen")
def buffer_written_and_read_in_forward() -> Subject:
    class Centring(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            seen: Tensor = self.seen  # type: ignore[assignment]
            seen.mul_(0.5).add_(0.5 * x.detach().mean((0, 1)))
            return super().forward(x - seen)

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Centring()
    return net(model)


@fault("refused", names="blocks.0.up.weight")
def parameter_written_in_forward() -> Subject:
    class Renormalising(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.mul_(0.99)
            return super().forward(x)

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Renormalising()
    return net(model)


@fault("refused", "memory", names="calls")
def counter_in_an_attribute() -> Subject:
    class Counting(Block):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return super().forward(x) * (1 + 0.01 * self.calls)

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Counting()
    model.blocks[0].calls = 0
    return net(model)


@fault("memory", "refused", names="masks")
def mask_of_the_first_micro_batch_kept_for_all() -> Subject:
    class Caching(Block):
        def __init__(self) -> None:
            super().__init__()
            self.masks: dict[int, Tensor] = {}

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            if length not in self.masks:
                self.masks[length] = (x.detach().mean(-1, keepdim=True) > 0).float()
            return super().forward(x * self.masks[length])

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Caching()
    return net(model)
