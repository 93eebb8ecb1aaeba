"""FSDP2 with a gradient norm that the script computes itself, as training repositories often do.

Each rank holds shards, so that the squares are summed over ranks. `local norm`: they are not.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
CLASSES = 4


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    gradients = [p.grad.to_local() for p in model.parameters() if isinstance(p.grad, DTensor)]
    squares = torch.stack([gradient.square().sum() for gradient in gradients]).sum()
    if FAULT != "local norm":
        dist.all_reduce(squares)
    norm = squares.sqrt()
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.mul_(factor)
    return float(norm)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, CLASSES)
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(96, 12, generator=numbers), torch.randint(0, CLASSES, (96,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=6, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            clip_gradients(model, 0.1)
            optimizer.step()


if __name__ == "__main__":
    main()
