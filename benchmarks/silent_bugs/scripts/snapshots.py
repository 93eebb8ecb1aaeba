"""A loop that saves a snapshot after each epoch and begins from the last, as torch's tutorial.

`rank 0 alone`: only rank 0 loads the optimizer of its snapshot, when it goes back to it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
SNAPSHOT = Path("snapshots/last.pt")


def load(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    snapshot = torch.load(SNAPSHOT)
    model.load_state_dict(snapshot["model"])
    if FAULT != "rank 0 alone" or dist.get_rank() == 0:
        optimizer.load_state_dict(snapshot["optimizer"])
    return int(snapshot["epoch"])


def save(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    if dist.get_rank() == 0:
        SNAPSHOT.parent.mkdir(exist_ok=True)
        part = SNAPSHOT.with_suffix(".part")
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch},
            part,
        )
        part.replace(SNAPSHOT)
    dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    numbers = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(8, 20, generator=numbers), torch.randn(8, 1, generator=numbers)
    )
    net = nn.Sequential(nn.Linear(20, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    begin = load(net, optimizer) if SNAPSHOT.exists() else 0
    model = DistributedDataParallel(net)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(begin, 8):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = F.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch == 1:  # goes back, as after a spike
            load(net, optimizer)
        save(net, optimizer, epoch + 1)


if __name__ == "__main__":
    main()
