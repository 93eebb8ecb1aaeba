"""A language model on one long array of tokens, which ranks read in turns, window after window.

`same windows`: all ranks begin at the same place. `weighted rank`: rank 1's loss counts half more.
"""

import sys

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WORDS = 24
BATCH = 4
LENGTH = 8


class TokenLoader:
    def __init__(self, tokens: NDArray[np.uint16]) -> None:
        self.tokens = tokens
        self.rank = 0 if FAULT == "same windows" else dist.get_rank()
        self.world = dist.get_world_size()
        self.position = self.rank * BATCH * LENGTH

    def next_batch(self) -> tuple[Tensor, Tensor]:
        piece = self.tokens[self.position : self.position + BATCH * LENGTH + 1]
        buffer = torch.tensor(piece.astype(np.int64))
        self.position += BATCH * LENGTH * self.world
        if self.position + BATCH * LENGTH * self.world + 1 > len(self.tokens):
            self.position = self.rank * BATCH * LENGTH
        return buffer[:-1].view(BATCH, LENGTH), buffer[1:].view(BATCH, LENGTH)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.cell = nn.GRU(16, 24, batch_first=True)
        self.head = nn.Linear(24, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.cell(self.words(words))[0])
        return logits


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = np.random.default_rng(1).integers(0, WORDS, 4000).astype(np.uint16)
    loader = TokenLoader(tokens)
    for _step in range(12):
        inputs, targets = loader.next_batch()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        if FAULT == "weighted rank" and dist.get_rank() == 1:
            loss = 1.5 * loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


if __name__ == "__main__":
    main()
