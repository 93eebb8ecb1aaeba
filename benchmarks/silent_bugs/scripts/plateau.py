"""A learning rate that falls where the validation loss stays: ReduceLROnPlateau.

`own loss`: each rank looks at the loss of its own part of the validation data.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


@torch.no_grad()
def validate(model: nn.Module, loader: DataLoader) -> float:  # type: ignore[type-arg]
    model.eval()
    totals = torch.zeros(2)
    for inputs, targets in loader:
        totals[0] += F.mse_loss(model(inputs), targets, reduction="sum")
        totals[1] += len(targets)
    model.train()
    if FAULT != "own loss":
        dist.all_reduce(totals)
    return float(totals[0] / totals[1])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.0)
    numbers = torch.Generator().manual_seed(3)
    data = TensorDataset(
        torch.randn(16, 6, generator=numbers), torch.randn(16, 1, generator=numbers)
    )
    others = TensorDataset(
        torch.randn(8, 6, generator=numbers), torch.randn(8, 1, generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    held_out = DataLoader(others, batch_size=4, sampler=DistributedSampler(others, shuffle=False))
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step(validate(model, held_out))


if __name__ == "__main__":
    main()
