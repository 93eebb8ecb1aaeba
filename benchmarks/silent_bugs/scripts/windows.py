"""Forecasts of a series from windows of it, by a recurrent network, dealt to ranks by hand.

`neighbours`: each rank takes windows that begin between those of the others, and overlap them, of
an order of its own.
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
LENGTH = 12
BATCH = 4


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(1, 12, batch_first=True)
        self.head = nn.Linear(12, 1)

    def forward(self, values: Tensor) -> Tensor:
        hidden, _ = self.cell(values)
        forecast: Tensor = self.head(hidden)
        return forecast


def batches(series: Tensor, epoch: int) -> Iterator[Tensor]:
    windows = series.unfold(0, LENGTH + 1, LENGTH + 1)
    rank = dist.get_rank()
    seed = epoch + (rank if FAULT == "neighbours" else 0)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    mine = order[rank :: dist.get_world_size()]
    for at in range(0, len(mine) - BATCH + 1, BATCH):
        yield windows[mine[at : at + BATCH]]


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Forecaster())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    noise = torch.randn(32 * (LENGTH + 1), generator=torch.Generator().manual_seed(1))
    series = (torch.arange(len(noise)) / 5).sin() + 0.1 * noise
    for epoch in range(4):
        for windows in batches(series, epoch):
            values = windows[..., None]
            loss = F.mse_loss(model(values[:, :-1]), values[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
