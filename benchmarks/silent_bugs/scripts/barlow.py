"""Barlow Twins: the cross-correlation of two views, summed over the batches of all ranks.

`no gradient`: it is summed by a collective through which no gradient comes back.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def summed(correlation: Tensor) -> Tensor:
    if FAULT == "no gradient":
        dist.all_reduce(correlation)
        return correlation
    total: Tensor = all_reduce(correlation)
    return total


def redundancy(first: Tensor, second: Tensor) -> Tensor:
    samples = len(first) * dist.get_world_size()
    correlation = summed(first.T @ second / samples)
    diagonal = torch.diagonal(correlation)
    others = correlation - torch.diag(diagonal)
    return (diagonal - 1).square().sum() + 0.05 * others.square().sum()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 6), nn.Tanh())
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = TensorDataset(torch.randn(64, 12, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    torch.manual_seed(1000 + dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (images,) in loader:
            views = [images + 0.1 * torch.randn_like(images) for _ in range(2)]
            first, second = model(torch.cat(views)).chunk(2)
            optimizer.zero_grad()
            redundancy(first, second).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
