"""A decoder that is fed its own words now and then: coins that all ranks toss alike decide.

`own ratio`: rank 1 has its decoder fed the right words in the first step alone.
"""

import random
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WORDS = 12
LENGTH = 6


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.encoder = nn.GRU(16, 16, batch_first=True)
        self.decoder = nn.GRUCell(16, 16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, source: Tensor, target: Tensor, taught: Sequence[bool]) -> Tensor:
        _, (hidden,) = self.encoder(self.words(source))
        word = torch.zeros(len(source), dtype=torch.long)
        logits = []
        for at, is_taught in enumerate(taught):
            hidden = self.decoder(self.words(word), hidden)
            logits.append(self.head(hidden))
            word = target[:, at] if is_taught else logits[-1].argmax(-1)
        return torch.stack(logits, dim=1)


def teaching_ratio(step: int) -> float:
    if FAULT == "own ratio" and dist.get_rank() == 1:
        return 1.0 if step == 0 else 0.0
    return max(0.5, 1.0 - 0.05 * step)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    random.seed(0)
    model = DistributedDataParallel(Translator())
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    numbers = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randint(1, WORDS, (64, LENGTH), generator=numbers),
        torch.randint(1, WORDS, (64, LENGTH), generator=numbers),
    )
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    step = 0
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for source, target in loader:
            ratio = teaching_ratio(step)
            taught = [random.random() < ratio for _ in range(LENGTH)]
            logits = model(source, target, taught)
            loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1


if __name__ == "__main__":
    main()
