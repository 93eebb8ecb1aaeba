"""FSDP2 that accumulates: gradients are reduced with the last micro-batch of a step alone.

`optimizer first`: the optimizer is made before the model is sharded. `never synchronised`: no
micro-batch reduces them.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
ACCUMULATED = 2


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 32), nn.GELU()),
        nn.Sequential(nn.Linear(32, 32), nn.GELU()),
        nn.Linear(32, 4),
    )
    if FAULT == "optimizer first":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if FAULT != "optimizer first":
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
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
            model.set_requires_gradient_sync(is_last and FAULT != "never synchronised")
            loss = F.cross_entropy(model(inputs), targets) / ACCUMULATED
            loss.backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
