"""What runs on each rank in `test_ranks.py`."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from lockstep.data import DistributedSampler, adopt
from tests.data.shared import plain, share


class Stream(IterableDataset[torch.Tensor]):
    """Rank 0 reads 3 samples, rank 1 reads 9."""

    rank_sharded = True

    def __iter__(self) -> Iterator[torch.Tensor]:
        rank = dist.get_rank()
        yield from (torch.tensor(100 * rank + k) for k in range(3 + 6 * rank))


def all_cases() -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    source = adopt(
        Stream(), batch_size=2, global_batch_size=4, assign=share(rank, ranks), epochs=2, seed=1, device="cpu"
    )
    return {"rows": plain(list(source)), "notice": source.notice, "places": list(DistributedSampler(7, shuffle=False))}
