"""A curriculum: early epochs take the easiest samples alone, in an order that ranks share out.

`from the rank on`: a rank takes all samples from its own number on, and not every so-manieth.
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class CurriculumSampler(Sampler[int]):
    def __init__(self, difficulty: Tensor, epochs: int) -> None:
        self.by_difficulty = difficulty.argsort().tolist()
        self.epochs = epochs
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        share = min(1.0, 0.5 + self.epoch / self.epochs)
        return int(len(self.by_difficulty) * share) // dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        rank = dist.get_rank()
        world = dist.get_world_size()
        easy = self.by_difficulty[: len(self) * world]
        numbers = torch.Generator().manual_seed(self.epoch)
        order = torch.randperm(len(easy), generator=numbers).tolist()
        mine = order[rank : rank + len(self)] if FAULT == "from the rank on" else order[rank::world]
        return iter([easy[at] for at in mine])


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 3))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = torch.Generator().manual_seed(1)
    inputs = torch.randn(96, 8, generator=numbers)
    labels = torch.randint(0, 3, (96,), generator=numbers)
    sampler = CurriculumSampler(inputs.norm(dim=1), epochs=4)
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=4, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
