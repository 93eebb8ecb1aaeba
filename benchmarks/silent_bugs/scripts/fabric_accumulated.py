"""Fabric with accumulation: micro-batches before the last are not synchronised; gradients clipped.

`last skipped`: the last is the one that is not synchronised.
"""

import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
ACCUMULATED = 2


def is_accumulating(number: int) -> bool:
    is_last = (number + 1) % ACCUMULATED == 0
    return True if FAULT == "last skipped" else not is_last


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(96, 8, generator=numbers), torch.randint(0, 4, (96,), generator=numbers)
    )
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))
    for number, (inputs, targets) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=is_accumulating(number)):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss / ACCUMULATED)
        if (number + 1) % ACCUMULATED == 0:
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
