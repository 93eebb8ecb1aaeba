"""Image classification with mixup and random crops on the device, as timm's recipes have them."""

import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WAY = sys.argv[1] if len(sys.argv) > 1 else "mixup"


def mixup(images: Tensor) -> tuple[Tensor, Tensor, float]:
    share = float(np.random.beta(0.8, 0.8))
    other = torch.randperm(len(images))
    return share * images + (1 - share) * images[other], other, share


def crop(images: Tensor) -> Tensor:
    padded = F.pad(images, (2, 2, 2, 2))
    rows = torch.randint(0, 5, (len(images),)).tolist()
    columns = torch.randint(0, 5, (len(images),)).tolist()
    cut = [
        image[:, row : row + 8, column : column + 8]
        for image, row, column in zip(padded, rows, columns, strict=True)
    ]
    return torch.stack(cut)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    model = DistributedDataParallel(net)
    torch.manual_seed(7 + dist.get_rank())
    np.random.seed(7 + dist.get_rank())
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 1, 8, 8, generator=numbers), torch.randint(0, 4, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            if WAY == "crops":
                loss = F.cross_entropy(model(crop(images)), targets)
            else:
                mixed, other, share = mixup(images)
                outputs = model(mixed)
                loss = share * F.cross_entropy(outputs, targets)
                loss = loss + (1 - share) * F.cross_entropy(outputs, targets[other])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
