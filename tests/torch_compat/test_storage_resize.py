"""`lockstep/torch_compat/storage_resize.py`: FSDP2's way to free memory calls the method that is replaced."""

import inspect
from typing import Any

import torch

from lockstep.torch_compat.storage_resize import resizes_watched


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
