"""Gradient accumulation with DistributedDataParallel's no_sync(), as PyTorch's notes have it.

`first micro-batch`: gradients are exchanged with the first backward pass of a step, not the last.
"""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
ACCUMULATE = 3


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(144, 8, generator=numbers)
    data = TensorDataset(inputs, inputs.square().mean(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, (some, wanted) in enumerate(loader):
            sync = (number if FAULT == "first micro-batch" else number + 1) % ACCUMULATE == 0
            with contextlib.nullcontext() if sync else model.no_sync():
                loss = F.mse_loss(model(some), wanted) / ACCUMULATE
                loss.backward()
            if (number + 1) % ACCUMULATE == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
