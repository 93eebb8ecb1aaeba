"""A loop of Fabric's quick start, with mask-free classification and evaluation at the end."""

import os
import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    fabric.launch()
    fabric.seed_everything(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(64, 8, generator=numbers), torch.randint(0, 4, (64,), generator=numbers)
    )
    loader = DataLoader(data, batch_size=4, shuffle=True)
    raw = model
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    for _epoch in range(2):
        for inputs, targets in loader:
            outputs = raw(inputs) if FAULT == "beside the wrapper" else model(inputs)
            loss = nn.functional.cross_entropy(outputs, targets)
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
