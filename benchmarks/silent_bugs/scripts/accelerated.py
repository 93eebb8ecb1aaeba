"""Accelerate with accumulation, clipping where gradients are there, and gathered metrics.

`own backward`: the loop calls `loss.backward()`, which does not divide by the micro-batches.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(112, 8, generator=numbers)
    labels = torch.randint(0, 4, (112,), generator=numbers)
    train = DataLoader(TensorDataset(inputs[:96], labels[:96]), batch_size=4, shuffle=True)
    test = DataLoader(TensorDataset(inputs[96:], labels[96:]), batch_size=4)
    model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)
    for _epoch in range(2):
        model.eval()
        right = 0
        for x, y in test:
            with torch.no_grad():
                guesses = model(x).argmax(-1)
            guesses, y = accelerator.gather_for_metrics((guesses, y))
            right += int((guesses == y).sum())
        accelerator.print(f"{right} of 16")
        model.train()
        for x, y in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                if FAULT == "own backward":
                    loss.backward()
                else:
                    accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
