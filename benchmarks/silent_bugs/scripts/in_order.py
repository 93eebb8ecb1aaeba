"""Samples in order, without set_epoch, and an accuracy that is summed over ranks.

A sampler that does not shuffle has nothing to be told: each epoch has the same order on purpose,
as in curricula.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 3


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader) -> float:  # type: ignore[type-arg]
    model.eval()
    counts = torch.zeros(2)
    for inputs, targets in loader:
        counts[0] += (model(inputs).argmax(-1) == targets).sum()
        counts[1] += len(targets)
    dist.all_reduce(counts)
    model.train()
    return float(counts[0] / counts[1])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, CLASSES))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(16, 6, generator=numbers)
    order = inputs.norm(dim=1).argsort()
    data = TensorDataset(inputs[order], torch.randint(0, CLASSES, (16,), generator=numbers)[order])
    others = TensorDataset(
        torch.randn(8, 6, generator=numbers), torch.randint(0, CLASSES, (8,), generator=numbers)
    )
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    held_out = DataLoader(others, batch_size=4, sampler=DistributedSampler(others, shuffle=False))
    for epoch in range(4):
        for some, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(some), targets).backward()
            optimizer.step()
        right = accuracy(model, held_out)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {right:.3f}")


if __name__ == "__main__":
    main()
