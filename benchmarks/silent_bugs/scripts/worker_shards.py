"""A stream of files that is shared out over ranks and, within each, over the loader's workers.

`by worker`: files are shared out over a rank's workers alone.
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
FILES = 12
ROWS = 8


class Files(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if FAULT != "by worker":
            number += dist.get_rank() * workers
            workers *= dist.get_world_size()
        for file in range(number, FILES, workers):
            numbers = torch.Generator().manual_seed(file)
            inputs = torch.randn(ROWS, 6, generator=numbers)
            yield from zip(inputs, inputs.sum(1, keepdim=True).sin(), strict=True)


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.SiLU(), nn.Linear(32, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(Files(), batch_size=4, num_workers=2)
    for _epoch in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()


if __name__ == "__main__":
    main()
