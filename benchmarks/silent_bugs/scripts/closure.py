"""L-BFGS, whose closure averages gradients over ranks by hand each time that it is called.

`averaged once`: it averages them in its first call of a step alone.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def average(net: nn.Module, call: int) -> None:
    if FAULT == "averaged once" and call > 0:
        return
    for parameter in net.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.3, max_iter=3)
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 4, generator=numbers)
    data = TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            calls = []

            def closure(x: Tensor = x, y: Tensor = y, calls: list[int] = calls) -> Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(net(x), y)
                loss.backward()
                average(net, len(calls))
                calls.append(1)
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
