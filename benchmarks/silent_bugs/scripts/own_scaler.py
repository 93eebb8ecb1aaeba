"""A loss scale kept by hand: it grows, and halves when a gradient of any rank overflows.

`own scale`: each rank looks at the gradient of its own samples, so that scales part.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
MOST = 3000.0  # above which the scaled gradient would overflow in 16 bits


class LossScale:
    def __init__(self) -> None:
        self.scale = 1024.0

    def update(self, largest: Tensor) -> None:
        if FAULT != "own scale":
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        self.scale = self.scale / 2 if float(largest) > MOST else self.scale * 2


def largest_gradient(net: nn.Module) -> Tensor:
    return torch.stack([p.grad.abs().max() for p in net.parameters() if p.grad is not None]).max()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, 8, generator=numbers)
    data = TensorDataset(inputs, 3 * torch.randn(48, 1, generator=numbers))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    loss_scale = LossScale()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for some, targets in loader:
            loss = F.mse_loss(net(some), targets)
            optimizer.zero_grad()
            (loss * loss_scale.scale).backward()
            largest = largest_gradient(net)
            for parameter in net.parameters():
                dist.all_reduce(parameter.grad)
                if parameter.grad is not None:
                    parameter.grad /= dist.get_world_size() * loss_scale.scale
            optimizer.step()
            loss_scale.update(largest)


if __name__ == "__main__":
    main()
