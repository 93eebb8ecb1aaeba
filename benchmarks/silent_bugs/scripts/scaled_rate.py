"""A summed loss with a learning rate that is scaled by the number of ranks, in plain SGD.

Averaging over ranks divides the sum by their number, and the rate makes up for it. `adam`: it does
not, where the step does not depend on the gradient's length.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
BASE_RATE = 1e-3


def main() -> None:
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    model = DistributedDataParallel(net)
    rate = BASE_RATE * world
    if FAULT == "adam":
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randint(0, 2, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs), targets, reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
