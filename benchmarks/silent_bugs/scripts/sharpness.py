"""Sharpness-aware minimisation: a step up along the gradient of all ranks, then one down.

`own ascent`: each rank goes up along the gradient of its own samples.
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
RADIUS = 0.1


def ascend(model: DistributedDataParallel, inputs: Tensor, targets: Tensor) -> list[Tensor]:
    with model.no_sync() if FAULT == "own ascent" else nullcontext():
        F.cross_entropy(model(inputs), targets).backward()
    parameters = list(model.parameters())
    gradients = [p.grad.clone() for p in parameters if p.grad is not None]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    steps = [RADIUS * gradient / norm for gradient in gradients]
    with torch.no_grad():
        for parameter, step in zip(parameters, steps, strict=True):
            parameter.add_(step)
    model.zero_grad()
    return steps


@torch.no_grad()
def descend(model: nn.Module, steps: list[Tensor]) -> None:
    for parameter, step in zip(model.parameters(), steps, strict=True):
        parameter.sub_(step)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randint(0, 4, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in DataLoader(data, batch_size=4, sampler=sampler):
            steps = ascend(model, inputs, targets)
            F.cross_entropy(model(inputs), targets).backward()
            descend(model, steps)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
