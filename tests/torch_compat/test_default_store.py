"""`lockstep/torch_compat/default_store.py`: ranks read what others wrote."""

import torch.distributed as dist

from lockstep.torch_compat.default_store import default_store
from tests.ranks import run_ranks


def counted() -> int:
    default_store().add("tests/default_store", 1)
    dist.barrier()
    return default_store().add("tests/default_store", 0)


def test_ranks_share_a_store() -> None:
    assert run_ranks(counted, 2) == [2, 2]
