"""`lockstep/torch_compat/fake_tensors.py`: tensors made inside have a device and bytes, and no memory."""

import inspect
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep.plan.rehearsal import fake_ranks
from lockstep.torch_compat.fake_tensors import FakeTensorMode, local_tensor, resizes_watched


def test_tensors_made_inside_hold_nothing() -> None:
    real = torch.ones(2, 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        huge = torch.empty(1 << 40, device="cpu")
        assert (huge.device.type, huge.untyped_storage().nbytes()) == ("cpu", 1 << 42)
        assert (real @ torch.empty(3, 4)).shape == (2, 4)


def test_a_sharded_tensor_has_its_part() -> None:
    with fake_ranks(2):
        whole = torch.arange(4.0)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        assert isinstance(sharded, DTensor)
        assert local_tensor(sharded).shape == (2,)
        assert local_tensor(sharded).data_ptr() == sharded.to_local().data_ptr()
        assert local_tensor(whole) is whole


def test_a_resize_is_told_while_the_method_is_replaced() -> None:
    original, told = torch.UntypedStorage.resize_, []

    def resized(storage: Any) -> None:
        told.append(storage.nbytes())

    tensor = torch.zeros(4)
    with resizes_watched(resized):
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(16)
    tensor.untyped_storage().resize_(0)
    assert told == [0, 16]
    assert torch.UntypedStorage.resize_ is original


def test_fsdp_frees_by_this_method() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    assert ".resize_(" in inspect.getsource(_fsdp_param)
