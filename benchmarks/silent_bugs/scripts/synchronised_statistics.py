"""Batch normalisation over the samples of all ranks, written by hand for CPUs.

`no gradient`: means of all ranks are computed without a gradient, as by a plain all_reduce.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def mean_of_ranks(value: Tensor) -> Tensor:
    if dist.get_world_size() == 1:
        return value
    if FAULT == "no gradient":
        value = value.detach().clone()
        dist.all_reduce(value)
        return value / dist.get_world_size()
    total: Tensor = torch.distributed.nn.all_reduce(value)
    return total / dist.get_world_size()


class SynchronisedNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = mean_of_ranks(x.mean(0))
        variance = mean_of_ranks((x - mean).square().mean(0))
        return (x - mean) * (variance + 1e-5).rsqrt() * self.weight + self.bias


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), SynchronisedNorm(16), nn.ReLU(), nn.Linear(16, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randint(0, 4, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
