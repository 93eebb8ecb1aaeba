"""VICReg: invariance of each pair, variance and covariance over the features of all ranks.

`own covariance`: features are not gathered, so that each rank has the covariance of its own batch.
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


class FullGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor) -> tuple[Tensor, ...]:
        parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features.contiguous())
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        every = torch.stack(gradients)
        dist.all_reduce(every)
        return every[dist.get_rank()]


def gathered(features: Tensor) -> Tensor:
    if FAULT == "own covariance":
        return features
    return torch.cat(FullGather.apply(features))  # type: ignore[no-untyped-call]


def spread(features: Tensor) -> Tensor:
    centred = features - features.mean(0)
    deviation = (centred.var(0) + 1e-4).sqrt()
    covariance = centred.T @ centred / (len(features) - 1)
    others = covariance - torch.diag(torch.diagonal(covariance))
    return F.relu(1 - deviation).mean() + others.square().sum() / features.shape[1]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 6))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(64, 12, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    torch.manual_seed(1000 + dist.get_rank())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (images,) in loader:
            views = torch.cat([images, images + 0.2 * torch.randn_like(images)])
            first, second = model(views).chunk(2)
            loss = 25 * F.mse_loss(first, second)
            loss = loss + 25 * (spread(gathered(first)) + spread(gathered(second)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
