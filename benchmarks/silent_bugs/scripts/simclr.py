"""SimCLR with the gathering layer that many of its implementations share.

Features of all ranks are gathered, and their gradients summed over ranks on the way back.
`own slice`: each rank takes its own slice of its own gradient alone.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
TEMPERATURE = 0.5


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor) -> tuple[Tensor, ...]:
        parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        every = torch.stack(gradients)
        if FAULT != "own slice":
            dist.all_reduce(every)
        return every[dist.get_rank()]


def gathered(features: Tensor) -> Tensor:
    return torch.cat(Gather.apply(features))  # type: ignore[no-untyped-call]


def nt_xent(first: Tensor, second: Tensor) -> Tensor:
    features = torch.cat([gathered(first), gathered(second)])
    count = len(features) // 2
    similarity = features @ features.T / TEMPERATURE
    similarity = similarity.masked_fill(torch.eye(2 * count, dtype=torch.bool), float("-inf"))
    positives = torch.arange(2 * count).roll(count)
    return F.cross_entropy(similarity, positives)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = TensorDataset(torch.randn(64, 12, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    torch.manual_seed(1000 + dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (images,) in loader:
            views = torch.cat(
                [images + 0.3 * torch.randn_like(images), images + 0.3 * torch.randn_like(images)]
            )
            first, second = F.normalize(model(views), dim=-1).chunk(2)
            loss = nt_xent(first, second)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
