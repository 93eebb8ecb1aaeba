"""Fabric's loop of a language model with dropout, on texts of unequal lengths: a mean over a
batch's words.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric, seed_everything
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.peers.small import LanguageModel, next_words, texts

fabric = Fabric(accelerator="cpu", devices=int(sys.argv[1]), strategy="ddp")
fabric.launch()
seed_everything(42)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(
    DataLoader(texts(), batch_size=8, shuffle=True, collate_fn=next_words)  # type: ignore[arg-type]
)
model.train()
for ids, targets in loader:
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
