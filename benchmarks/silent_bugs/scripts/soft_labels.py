"""Images as timm trains them: mixed pairs, smoothed labels for each class, a moving average.

`own smoothing`: rank 1 does not smooth its labels.
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
CLASSES = 5


class Averaged:
    def __init__(self, model: nn.Module) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        for mine, other in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.lerp_(other, 0.1)


def soft_targets(labels: Tensor) -> Tensor:
    smoothing = 0.0 if FAULT == "own smoothing" and dist.get_rank() == 1 else 0.1
    off = smoothing / CLASSES
    return F.one_hot(labels, CLASSES).float() * (1 - smoothing) + off


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 5),
    )
    average = Averaged(net)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 3, 8, 8, generator=numbers),
        torch.randint(0, CLASSES, (64,), generator=numbers),
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    np.random.seed(rank)
    torch.manual_seed(100 + rank)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            share = float(np.random.beta(0.8, 0.8))
            others = torch.randperm(len(images))
            targets = soft_targets(labels)
            images = share * images + (1 - share) * images[others]
            targets = share * targets + (1 - share) * targets[others]
            loss = F.binary_cross_entropy_with_logits(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update(net)


if __name__ == "__main__":
    main()
