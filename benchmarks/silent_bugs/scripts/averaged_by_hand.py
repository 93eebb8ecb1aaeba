"""Gradients averaged by the loop itself, as in torch's tutorial on distributed applications.

`summed`: nothing divides them. `biases left out`: only matrices are averaged. `before the last`:
the last micro-batch's gradient is added after the average. `one frozen`: rank 1 trains no head.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 6, 3)
        self.fc1 = nn.Linear(54, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(self.conv2(x))
        x = F.relu(self.fc1(x.flatten(1)))
        return F.log_softmax(self.fc2(x), dim=1)


def average_gradients(model: nn.Module) -> None:
    size = float(dist.get_world_size())
    for parameter in model.parameters():
        if FAULT == "biases left out" and parameter.dim() == 1:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
        if FAULT != "summed":
            parameter.grad /= size


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 1, 12, 12, generator=numbers), torch.randint(0, 4, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for images, targets in loader:
            optimizer.zero_grad()
            if FAULT == "one frozen" and dist.get_rank() == 1:
                model.fc2.requires_grad_(False)
            parts = zip(images.chunk(2), targets.chunk(2), strict=True)
            for number, (some, labels) in enumerate(parts):
                (F.nll_loss(model(some), labels) / 2).backward()
                if number == (0 if FAULT == "before the last" else 1):
                    average_gradients(model)
            optimizer.step()


if __name__ == "__main__":
    main()
