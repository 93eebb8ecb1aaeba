"""Sound models, which must pass."""

import math
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.silent_bugs.faults.models import (
    WIDTH,
    Block,
    Chain,
    Chaos,
    Net,
    Taught,
    Vectors,
    follow_student,
    net,
    vectors,
)
from benchmarks.silent_bugs.faults.registry import sound
from lockstep.verify import Subject


@sound()
def language_model_with_dropout() -> Subject:
    return net()


@sound(topology="fsdp:2")
def language_model_sharded() -> Subject:
    return net()


@sound(topology="pipeline:2")
def language_model_in_a_pipeline() -> Subject:
    return net(Chain())


@sound()
def batch_norm() -> Subject:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, WIDTH))
    return vectors(model)


@sound()
def ema_teacher() -> Subject:
    return Subject(Taught(), Vectors(), prepare=follow_student)


@sound()
def spectral_norm() -> Subject:
    torch.manual_seed(0)
    inner = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return vectors(nn.Sequential(inner, nn.Tanh(), nn.Linear(WIDTH, WIDTH)))


@sound()
def chaotic_net() -> Subject:
    return vectors(Chaos())


@sound(topology="fsdp:2")
def chaotic_net_sharded() -> Subject:
    return vectors(Chaos())


@sound()
def python_and_numpy_random_numbers() -> Subject:
    class Drawing(Net):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * (0.5 + random.random()) * float(1 + np.random.rand())

    return net(Drawing())


@sound()
def tied_weights() -> Subject:
    model = Net()
    model.head.weight = model.embed.weight
    return net(model)


@sound(topology="pipeline:2")
def tied_weights_in_a_pipeline() -> Subject:
    model = Chain()
    model.head.weight = model.stem.embed.weight
    return net(model)


@sound(settings={"training.gradient_checkpointing": "full", "training.gradient_clip": 0.1})
def recomputed_and_clipped() -> Subject:
    return net()


@sound(settings={"precision.mode": "bf16"}, topology="fsdp:2")
def low_precision() -> Subject:
    return net()


@sound()
def frozen_layer_and_a_unused_one() -> Subject:
    model = Net()
    model.embed.requires_grad_(False)
    return net(model)


@sound()
def contrastive_in_each_micro_batch() -> Subject:
    class InBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one = nn.Linear(WIDTH, WIDTH)
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a = self.one(x)
            b = self.other(y)
            return functional.cross_entropy(a @ b.T / math.sqrt(WIDTH), torch.arange(len(a)))

        def count(self, batch: Any) -> int:
            return len(batch[0])

    return Subject(InBatch(), Vectors())


@sound()
def module_with_a_cache_that_changes_nothing() -> Subject:
    class Caching(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x.detach()
            return super().forward(x)

    model = Net()
    torch.manual_seed(1)
    model.blocks[0] = Caching()
    return net(model)
