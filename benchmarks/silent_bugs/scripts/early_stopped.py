"""Training that stops once the validation loss is low enough, each rank validating its own part.

The ranks' losses are averaged before they are compared. `own decision`: each rank stops by its own.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
GOAL = 0.5


def validation_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    model.eval()
    with torch.no_grad():
        loss = F.mse_loss(model(inputs), targets)
    if FAULT != "own decision":
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    model.train()
    return float(loss)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 4, generator=numbers)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    easy = torch.randn(16, 4, generator=numbers)
    held_out = torch.cat([0.1 * easy, 2.0 * easy]).chunk(2)
    mine = torch.cat([part for at, part in enumerate(held_out) if at % world == rank])
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for some, wanted in loader:
            optimizer.zero_grad()
            F.mse_loss(model(some), wanted).backward()
            optimizer.step()
            if validation_loss(net, mine, mine.sum(1, keepdim=True)) < GOAL:
                return


if __name__ == "__main__":
    main()
