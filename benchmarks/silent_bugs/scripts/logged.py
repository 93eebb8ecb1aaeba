"""Losses and accuracies are averaged over ranks for a log, each step.

`logged loss`: the loss that is averaged for the log, by a collective through which gradients pass,
is the one that is trained on, and is not divided.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
CLASSES = 4


def reduced(loss: Tensor) -> Tensor:
    total: Tensor = torch.distributed.nn.all_reduce(loss)
    return total if FAULT == "logged loss" else total / dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, CLASSES))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randint(0, CLASSES, (64,), generator=numbers)
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    accuracy = MulticlassAccuracy(CLASSES)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        accuracy.reset()
        for inputs, targets in loader:
            outputs = model(inputs)
            loss = F.cross_entropy(outputs, targets)
            if FAULT == "logged loss":
                loss = reduced(loss)
                shown = float(loss)
            else:
                shown = float(reduced(loss.detach()))
            accuracy.update(outputs.detach(), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0:
                print(f"loss {shown:.3f}")
        print(f"accuracy {float(accuracy.compute()):.3f}")


if __name__ == "__main__":
    main()
