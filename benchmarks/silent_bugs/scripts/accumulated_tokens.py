"""Accelerate's own guide for accumulation over texts of unequal lengths: tokens of all are counted.

`local count`: each process divides by the tokens of its own micro-batches.
"""

import sys
from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
ACCUMULATED = 2
WORDS = 40
LENGTH = 10
IGNORED = -100


def tokens_of(accelerator: Accelerator, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    count = sum((targets != IGNORED).sum() for _, targets in batches)
    assert isinstance(count, Tensor)
    if FAULT == "local count":
        return count * accelerator.num_processes
    total: Tensor = accelerator.gather(count).sum()
    return total


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATED)
    set_seed(0)
    numbers = torch.Generator().manual_seed(1)
    words = torch.randint(0, WORDS, (96, LENGTH + 1), generator=numbers)
    ends = torch.randint(2, LENGTH + 1, (96, 1), generator=numbers)
    targets = words[:, 1:].masked_fill(torch.arange(LENGTH) >= ends, IGNORED)
    loader = DataLoader(TensorDataset(words[:, :-1], targets), batch_size=4, shuffle=True)
    model: nn.Module = nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.GELU())
    model.append(nn.Linear(32, WORDS))  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    read = iter(loader)
    for _ in range(5):
        batches = list(islice(read, ACCUMULATED))
        count = tokens_of(accelerator, batches)
        for inputs, wanted in batches:
            with accelerator.accumulate(model):
                logits = model(inputs).flatten(0, 1)
                loss = F.cross_entropy(logits, wanted.flatten(), reduction="sum")
                scale = accelerator.num_processes * ACCUMULATED
                accelerator.backward(loss * scale / count)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
