"""A mixture of experts whose router is balanced over the tokens of all ranks, as Switch.

`own balance`: each rank balances its own tokens.
"""

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
EXPERTS = 4
WORDS = 40
WIDTH = 16


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shares = self.router(x).softmax(-1)
        weights, chosen = shares.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        added = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            added = added.index_add(0, rows, expert(x[rows]) * weights[rows, place][:, None])
        return x + added, shares, chosen


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(WORDS, WIDTH)
        self.mixture = Mixture()
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, shares, chosen = self.mixture(self.embeddings(words).flatten(0, 1))
        return self.head(x), shares, chosen


def balance(shares: Tensor, chosen: Tensor) -> Tensor:
    counts = F.one_hot(chosen, EXPERTS).sum((0, 1)).float()
    if FAULT != "own balance":
        dist.all_reduce(counts)
    return EXPERTS * (counts / counts.sum() * shares.mean(0)).sum()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(
        torch.randint(0, WORDS, (64, 9), generator=torch.Generator().manual_seed(1))
    )
    sampler = DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (words,) in DataLoader(data, batch_size=4, sampler=sampler):
            logits, shares, chosen = model(words[:, :-1])
            loss = F.cross_entropy(logits, words[:, 1:].flatten())
            loss = loss + 0.01 * balance(shares, chosen)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
