"""Uneven inputs under DDP's Join, as torch's tutorial: rank r has r more batches than rank 0.

`not joined`: rank 1's additional batch waits for gradients that rank 0 does not send.
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
FEWEST = 2 if FAULT else 5  # batches
SIZE = 4


def own_part(data: TensorDataset) -> Subset[tuple[Tensor, ...]]:
    rank = dist.get_rank()
    begin = sum(FEWEST + before for before in range(rank)) * SIZE
    return Subset(data, range(begin, begin + (FEWEST + rank) * SIZE))


def train(model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
    world = dist.get_world_size()
    count = sum(FEWEST + rank for rank in range(world)) * SIZE
    data = TensorDataset(torch.randn(count, 6, generator=torch.Generator().manual_seed(1)))
    loader = DataLoader(own_part(data), batch_size=SIZE, shuffle=True)
    with nullcontext() if FAULT == "not joined" else Join([model]):
        for (inputs,) in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), inputs[:, :1].sin()).backward()
            optimizer.step()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    train(model, optimizer)


if __name__ == "__main__":
    main()
