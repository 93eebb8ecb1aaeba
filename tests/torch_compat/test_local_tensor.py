"""`lockstep/torch_compat/local_tensor.py`: a DTensor holds its part as a plain tensor."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep.plan.rehearsal import fake_ranks
from lockstep.torch_compat.local_tensor import local_tensor


def test_a_sharded_tensor_has_its_part() -> None:
    with fake_ranks(2):
        whole = torch.arange(4.0)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        assert isinstance(sharded, DTensor)
        assert local_tensor(sharded).shape == (2,)
        assert local_tensor(sharded).data_ptr() == sharded.to_local().data_ptr()
        assert local_tensor(whole) is whole
