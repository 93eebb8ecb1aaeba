"""Data that are dealt to ranks by hand, an endless loader, and a cosine over all its batches.

The cosine ends with the batches of the smallest part. `own length`: with those of a rank's own.
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
EPOCHS = 2


def endless(loader: DataLoader[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def total_steps(loader: DataLoader[tuple[Tensor, Tensor]]) -> int:
    batches = torch.tensor(len(loader))
    if FAULT != "own length":
        dist.all_reduce(batches, op=dist.ReduceOp.MIN)
    return EPOCHS * int(batches)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(25, 8, generator=numbers), torch.randint(0, 4, (25,), generator=numbers)
    )
    part = Subset(data, list(range(rank, len(data), world)))
    order = torch.Generator().manual_seed(rank)
    loader = DataLoader(part, batch_size=4, shuffle=True, generator=order)
    steps = total_steps(loader)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _, (inputs, targets) in zip(range(steps), endless(loader), strict=False):
        loss = F.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


if __name__ == "__main__":
    main()
