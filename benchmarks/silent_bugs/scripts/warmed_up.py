"""A warm-up whose length is counted in steps, and a decay after it, by LambdaLR.

`own length`: a rank counts the warm-up in steps of its own number.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def warm_up_steps() -> int:
    if FAULT == "own length":
        return 5 + 5 * dist.get_rank()
    return 5


def factor(step: int) -> float:
    steps = warm_up_steps()
    if step < steps:
        return float((step + 1) / steps)
    return float((steps / (step + 1)) ** 0.5)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randn(64, 1, generator=numbers)
    )
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
            optimizer.zero_grad()
            F.smooth_l1_loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()


if __name__ == "__main__":
    main()
