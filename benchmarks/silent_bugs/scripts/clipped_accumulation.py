"""Accumulation with no_sync and clipping of the step's gradient.

`each clipped`: each micro-batch is clipped, so that ranks clip gradients of their own before the
last is reduced.
"""

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
ACCUMULATED = 2


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(96, 8, generator=numbers), torch.randint(0, 4, (96,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler, drop_last=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            is_last = (number + 1) % ACCUMULATED == 0
            with nullcontext() if is_last else model.no_sync():
                loss = F.cross_entropy(model(inputs), targets) / ACCUMULATED
                loss.backward()
            if is_last or FAULT == "each clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
