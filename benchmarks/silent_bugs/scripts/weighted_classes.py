"""Classification with weights of classes, whose mean is over the weights of a rank's samples."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WAY = sys.argv[1] if len(sys.argv) > 1 else ""
WEIGHTS = torch.tensor([0.2, 1.0, 2.0, 5.0])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank = dist.get_rank()
    world = dist.get_world_size()
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randint(0, 4, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            outputs = model(inputs)
            if WAY == "local mean":
                loss = F.cross_entropy(outputs, targets, WEIGHTS)
            elif WAY == "weighted rank":  # nothing is weighted but the ranks
                loss = F.cross_entropy(outputs, targets) * (0.9 if rank == 0 else 1.1)
                if world == 1:
                    loss = F.cross_entropy(outputs, targets)
            else:
                total = WEIGHTS[targets].sum()
                dist.all_reduce(total)
                loss = F.cross_entropy(outputs, targets, WEIGHTS, reduction="sum") * world / total
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
