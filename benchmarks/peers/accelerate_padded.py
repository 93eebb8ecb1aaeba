"""Accelerate's loop of a language model with dropout, on texts of unequal lengths: a mean over a
batch's words.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.peers.small import LanguageModel, next_words, texts

set_seed(42)
accelerator = Accelerator(cpu=True)
model = LanguageModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(texts(), batch_size=8, shuffle=True, collate_fn=next_words)  # type: ignore[arg-type]
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()
for ids, targets in loader:
    loss = F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
