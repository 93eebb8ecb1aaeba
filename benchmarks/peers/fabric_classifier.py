"""The loop of Fabric's image classifier example."""

import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric, seed_everything
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.peers.small import classifier, images

fabric = Fabric(accelerator="cpu", devices=int(sys.argv[1]), strategy="ddp")
fabric.launch()
seed_everything(42)
model = classifier()
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(DataLoader(images(), batch_size=8, shuffle=True))
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
for _epoch in range(2):
    model.train()
    for pixels, classes in loader:
        optimizer.zero_grad()
        fabric.backward(torch.nn.functional.cross_entropy(model(pixels), classes))
        optimizer.step()
    schedule.step()
