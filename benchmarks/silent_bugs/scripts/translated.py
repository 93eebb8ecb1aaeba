"""A recurrent encoder and decoder with teacher forcing for a share of the batches.

All ranks toss one coin. `own words`: each rank's loss is a
mean over its own words, of targets of unequal lengths.
"""

import random
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
WORDS = 20
PAD = 0
LENGTH = 6


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WORDS, 12, padding_idx=PAD)
        self.encoder = nn.GRU(12, 16, batch_first=True)
        self.decoder = nn.GRUCell(12, 16)
        self.head = nn.Linear(16, WORDS)

    def forward(self, source: Tensor, target: Tensor, forces: bool) -> Tensor:
        _, hidden = self.encoder(self.embeddings(source))
        state = hidden[0]
        word = target[:, 0]
        outputs = []
        for at in range(1, target.shape[1]):
            state = self.decoder(self.embeddings(word), state)
            outputs.append(self.head(state))
            word = target[:, at] if forces else outputs[-1].argmax(-1)
        return torch.stack(outputs, 1)


def loss_of(outputs: Tensor, wanted: Tensor) -> Tensor:
    loss = F.cross_entropy(
        outputs.flatten(0, 1), wanted.flatten(), ignore_index=PAD, reduction="sum"
    )
    words = (wanted != PAD).sum()
    if FAULT == "own words":
        return loss / words
    dist.all_reduce(words)
    return loss * dist.get_world_size() / words


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Translator())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    random.seed(4)
    numbers = torch.Generator().manual_seed(1)
    source = torch.randint(1, WORDS, (64, LENGTH), generator=numbers)
    ends = torch.randint(2, LENGTH + 1, (64, 1), generator=numbers)
    target = source.flip(1).masked_fill(torch.arange(LENGTH) >= ends, PAD)
    data = TensorDataset(source, target)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for some, translated in loader:
            forces = random.random() < 0.5
            loss = loss_of(model(some, translated, forces), translated[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


if __name__ == "__main__":
    main()
