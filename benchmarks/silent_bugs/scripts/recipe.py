"""The training recipe of timm: mixup, label smoothing, an average of weights, warm-up, clipping.

`stepped by all`: the schedule is stepped once for each rank. `no epoch`: the sampler is never told
the epoch. `clipped early`: gradients are clipped while ranks still have their own.
"""

import copy
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
CLASSES = 4


class AverageOfWeights:
    def __init__(self, model: nn.Module) -> None:
        self.module = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, theirs in zip(self.module.parameters(), model.parameters(), strict=True):
            mine.lerp_(theirs, 0.1)


def mixed(images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    share = float(np.random.beta(0.8, 0.8))
    off = 0.1 / CLASSES
    smooth = F.one_hot(targets, CLASSES) * (1 - 0.1) + off
    return images * share + images.flip(0) * (1 - share), smooth * share + smooth.flip(0) * (
        1 - share
    )


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.manual_seed(42)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4)
    )
    torch.manual_seed(42 + rank)
    np.random.seed(42 + rank)
    model = DistributedDataParallel(net)
    average = AverageOfWeights(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(24, 3, 4, 4, generator=numbers),
        torch.randint(0, CLASSES, (24,), generator=numbers),
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler, drop_last=True)
    for epoch in range(6):
        if FAULT != "no epoch":
            sampler.set_epoch(epoch)
        for images, targets in loader:
            images, wanted = mixed(images, targets)
            with model.no_sync():
                loss = torch.sum(-wanted * F.log_softmax(model(images), -1), -1).mean()
                loss.backward()
            if FAULT == "clipped early":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
            if FAULT != "clipped early":
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            average.update(net)
            for _ in range(world if FAULT == "stepped by all" else 1):
                schedule.step()


if __name__ == "__main__":
    main()
