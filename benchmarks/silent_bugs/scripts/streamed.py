"""A classifier on a stream of samples: an IterableDataset that each rank reads in part.

`unsharded`: each rank reads all of it. `weighted rank`: a rank's loss counts more.
"""

import sys
from collections.abc import Iterator
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        workers = 1 if worker is None else worker.num_workers
        sharded = FAULT != "unsharded"
        rank = dist.get_rank() if sharded else 0
        world = dist.get_world_size() if sharded else 1
        begin = rank * workers + (0 if worker is None else worker.id)
        yield from islice(self.samples(), begin, None, world * workers)

    def samples(self) -> Iterator[tuple[Tensor, Tensor]]:
        numbers = torch.Generator().manual_seed(1)
        for _ in range(160):
            inputs = torch.randn(8, generator=numbers)
            yield inputs, (inputs[:3].sum() > 0).float()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    loader = DataLoader(Stream(), batch_size=8, num_workers=1)
    for inputs, targets in loader:
        logits = model(inputs).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, targets)
        if FAULT == "weighted rank" and dist.get_rank() == 1:
            loss = loss * 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
