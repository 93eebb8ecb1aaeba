"""Texts in batches of similar length, by a batch sampler of its own, as in translation and speech.

All ranks shuffle the batches alike, by the epoch, and each takes every so-manieth. `own order`:
each rank shuffles by a seed of its own. `one order`: the epoch is not in the seed. `not told`: the
loop does not tell the sampler the epoch.
"""

import random
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
TEXTS = 16 if FAULT in ("one order", "not told") else 96
WORDS = 30
SIZE = 4


class Texts(Dataset[Tensor]):
    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(1)
        lengths = torch.randint(4, 12, (TEXTS,), generator=numbers).tolist()
        self.texts = [torch.randint(1, WORDS, (n,), generator=numbers) for n in lengths]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, at: int) -> Tensor:
        return self.texts[at]


class BucketSampler(Sampler[list[int]]):
    def __init__(self, lengths: Sequence[int], seed: int = 0) -> None:
        by_length = sorted(range(len(lengths)), key=lambda at: lengths[at])
        self.batches = [by_length[at : at + SIZE] for at in range(0, len(by_length), SIZE)]
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.batches) // self.world

    def __iter__(self) -> Iterator[list[int]]:
        seed = self.seed if FAULT == "one order" else self.seed + self.epoch
        if FAULT == "own order":
            seed += 100 * self.rank
        batches = self.batches.copy()
        random.Random(seed).shuffle(batches)
        yield from batches[self.rank : len(self) * self.world : self.world]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WORDS, 16)
        self.hidden = nn.Linear(16, 32)
        self.head = nn.Linear(32, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(F.gelu(self.hidden(self.embeddings(words))))
        return logits


def collate(texts: list[Tensor]) -> Tensor:
    return pad_sequence(texts, batch_first=True)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Texts()
    sampler = BucketSampler([len(text) for text in data.texts])
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    for epoch in range(4):
        if FAULT != "not told":
            sampler.set_epoch(epoch)
        for words in loader:
            targets = words[:, 1:]
            logits = model(words[:, :-1]).flatten(0, 1)
            losses = F.cross_entropy(logits, targets.flatten(), reduction="none")
            valid = (targets != 0).sum()
            total = valid.clone()
            dist.all_reduce(total)
            kept = losses * (targets.flatten() != 0)
            loss = kept.sum() * dist.get_world_size() / total
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
