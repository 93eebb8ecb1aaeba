"""A classifier with dropout and batch norm in plain DDP, which rank 0 evaluates now and then."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


@torch.no_grad()
def evaluate(model: nn.Module, data: TensorDataset) -> float:
    model.eval()
    hits = [int((model(x).argmax(1) == y).sum()) for x, y in DataLoader(data, batch_size=16)]
    return sum(hits) / len(data)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    model = DistributedDataParallel(net)
    torch.manual_seed(10 + rank)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 16, generator=numbers), torch.randint(0, 4, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for number, (inputs, targets) in enumerate(loader):
            if rank == 0 and number % 4 == 1:
                evaluate(model.module, data)
                if FAULT != "evaluation mode":
                    model.module.train()
            loss = F.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
