"""Data that fit into memory: each rank keeps every so-manieth row, and takes slices of these.

`shifted labels`: rank 1's labels are shifted by a row. `head by hand`: the head's gradient is not
averaged.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
BATCH = 4


def own_part(inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    rank = dist.get_rank()
    world = dist.get_world_size()
    if FAULT == "shifted labels":
        labels = labels.roll(rank)
    return inputs[rank::world], labels[rank::world]


def average(parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(8, 24), nn.ReLU())
    model = nn.Sequential(body, nn.Linear(24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 8, generator=numbers)
    labels = torch.randint(0, 4, (64,), generator=numbers)
    inputs, labels = own_part(inputs, labels)
    for _epoch in range(2):
        for at in range(0, len(inputs), BATCH):
            loss = F.cross_entropy(model(inputs[at : at + BATCH]), labels[at : at + BATCH])
            optimizer.zero_grad()
            loss.backward()
            average(list((body if FAULT == "head by hand" else model).parameters()))
            optimizer.step()


if __name__ == "__main__":
    main()
