"""A small distributed training script with a fault that was reported elsewhere, or without it.

    torchrun --nproc-per-node 2 benchmarks/silent_bugs/program.py CASE [sound]

The script is what `lockstep verify` and `lockstep launch --watch-training` are given; it knows
nothing of them. A case is a class in `cases.py` that changes a few lines of this loop.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

SAMPLES = 96
LENGTH = 6
WIDTH = 8
CLASSES = 5
IGNORED = -100


class Net(nn.Module):
    """Two layers over each position of a sequence, which see the positions before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 16)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(F.gelu(self.up(self.norm(x))))
        return y


class Program:
    """A right training loop over replicas; a case changes a part of it where `faulty`."""

    batch_size = 8
    accumulate = 1
    uneven = False
    epochs = 2

    def __init__(self, faulty: bool) -> None:
        self.faulty = faulty
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.on_ranks = faulty and self.world > 1

    def dataset(self) -> Dataset[Any]:
        numbers = torch.Generator().manual_seed(1)
        inputs = torch.randn(SAMPLES, LENGTH, WIDTH, generator=numbers)
        targets = torch.randint(0, CLASSES, (SAMPLES, LENGTH), generator=numbers)
        if self.uneven:
            lengths = torch.randint(1, LENGTH + 1, (SAMPLES, 1), generator=numbers)
            targets = torch.where(torch.arange(LENGTH) < lengths, targets, IGNORED)
        return TensorDataset(inputs, targets)

    def loader(self) -> DataLoader[Any]:
        data = self.dataset()
        return DataLoader(data, batch_size=self.batch_size, sampler=DistributedSampler(data))

    def model(self) -> nn.Module:
        return Net()

    def parallel(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)

    def make_schedule(self) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)

    def prepare(self) -> None:
        """Change what is made, before the first step."""

    def begin_epoch(self, epoch: int) -> None:
        if isinstance(self.data.sampler, DistributedSampler):
            self.data.sampler.set_epoch(epoch)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if self.uneven:  # each rank's sum, over the mean number of targets of a rank
            count = (targets != IGNORED).sum().float()
            dist.all_reduce(count)
            return (
                self.cross_entropy(self.runs(inputs), targets, "sum")
                * self.world
                / count
                / self.accumulate
            )
        return self.cross_entropy(self.runs(inputs), targets) / self.accumulate

    def cross_entropy(self, logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction
        )

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def reduce(self) -> None:
        """Exchange gradients, where no wrapper does."""

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    def after(self) -> None:
        """Do what follows a step."""

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for epoch in range(self.epochs):
            self.begin_epoch(epoch)
            yield from self.data

    def run(self) -> None:
        self.data = self.loader()
        self.net = self.model()
        self.runs = self.parallel(self.net)
        self.optimizer = self.make_optimizer()
        self.schedule = self.make_schedule()
        self.prepare()
        for number, (inputs, targets) in enumerate(self.batches(), start=1):
            self.number = number
            self.backward(self.loss(inputs, targets))
            if number % self.accumulate == 0:
                self.reduce()
                self.clip()
                self.update()
                self.clear()
                self.after()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from benchmarks.silent_bugs.cases import CASES

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    CASES[sys.argv[1]].make("sound" not in sys.argv).run()
