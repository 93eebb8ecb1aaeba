"""CutMix: a box of each image comes from another one; its area weighs the labels.

Each rank draws boxes of its own for a whole batch. `area of the draw`: rank 1 weighs labels by the
area that was drawn, and not by that of the box that fits into the image.
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
SIZE = 8


def cut_and_mixed(images: Tensor) -> tuple[Tensor, Tensor, float]:
    share = float(np.random.beta(1.0, 1.0))
    side = int(SIZE * (1 - share) ** 0.5)
    row = np.random.randint(SIZE)
    column = np.random.randint(SIZE)
    top = max(row - side // 2, 0)
    bottom = min(row + side // 2, SIZE)
    left = max(column - side // 2, 0)
    right = min(column + side // 2, SIZE)
    order = torch.randperm(len(images))
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[order, :, top:bottom, left:right]
    if FAULT != "area of the draw" or dist.get_rank() == 0:
        share = 1 - (bottom - top) * (right - left) / SIZE**2
    return mixed, order, share


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    )
    net.append(nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(50 + rank)
    np.random.seed(50 + rank)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 3, SIZE, SIZE, generator=numbers),
        torch.randint(0, 4, (64,), generator=numbers),
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            mixed, order, share = cut_and_mixed(images)
            outputs = model(mixed)
            loss = share * F.cross_entropy(outputs, labels)
            loss = loss + (1 - share) * F.cross_entropy(outputs, labels[order])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
