"""A loop of plain PyTorch over shards of FSDP2 or FSDP1, on samples that are held by rank."""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(dist.get_rank(), 96, dist.get_world_size()):
            yield (
                torch.randn(8, generator=torch.Generator().manual_seed(number)),
                torch.tensor(number % 5),
            )


def main(kind: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 33), nn.GELU(), nn.Linear(33, 5))
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for inputs, targets in DataLoader(Stream(), batch_size=4):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1])
