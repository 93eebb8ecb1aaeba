"""Adversarial training: inputs are moved a step to where the loss is larger, then trained on.

`own strength`: rank 1 moves its inputs twice as far.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def strength() -> float:
    return 0.2 if FAULT == "own strength" and dist.get_rank() == 1 else 0.1


def attacked(net: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    moved = inputs.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(net(moved), targets), moved)
    return inputs + strength() * gradient.sign()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randint(0, 4, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            inputs = attacked(net, inputs, targets)
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
