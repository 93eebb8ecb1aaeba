"""`lockstep/torch_compat/fake_tensors.py`: tensors made inside have a device and bytes, and no
memory.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lockstep.plan.rehearsal import fake_ranks
from lockstep.torch_compat.dispatch_mode import UntracedDispatchMode
from lockstep.torch_compat.fake_tensors import (
    FakeTensorMode,
    OutputCache,
    local_tensor,
    resizes_watched,
)


def test_tensors_made_inside_hold_nothing() -> None:
    real = torch.ones(2, 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        huge = torch.empty(1 << 40, device="cpu")
        assert (huge.device.type, huge.untyped_storage().nbytes()) == ("cpu", 1 << 42)
        assert (real @ torch.empty(3, 4)).shape == (2, 4)


class _Caching(UntracedDispatchMode):
    """Takes outputs from the cache where it can, and counts the calls that it did not know."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = OutputCache(mode)
        self.unknown = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def count(*_call: Any) -> None:
            self.unknown += func.namespace == "aten"

        return self.cache.run(func, args, kwargs or {}, count)[0]


def _description(tensor: Tensor, base: Tensor) -> tuple[Any, ...]:
    owner = tensor.untyped_storage()._cdata == base.untyped_storage()._cdata
    return (
        type(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.dtype,
        tensor.device,
        tensor.untyped_storage().nbytes(),
        owner,
        tensor is base,
        tensor.requires_grad,
    )


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x @ x,
        lambda x: x.t()[1:],
        lambda x: x.add_(1),
        lambda x: x + 1.0,
        lambda x: x.bool() + 1,
        lambda x: list(x.unbind()),
        lambda x: torch.var_mean(x, 0),
        lambda x: torch.empty(3, dtype=torch.bfloat16),
        lambda x: x.bfloat16(),
        lambda x: x.reshape(2, 8),
        lambda x: torch.nn.functional.layer_norm(x, (4,)),
        lambda x: torch.nn.functional.scaled_dot_product_attention(
            x[None, None], x[None, None], x[None, None]
        ),
    ],
)
def test_outputs_from_the_cache_are_those_of_the_mode(run: Callable[[Tensor], Any]) -> None:
    found = []
    with FakeTensorMode() as mode, _Caching(mode) as caching:
        for time in range(2):
            x = torch.empty(4, 4)
            before = caching.unknown
            out = run(x)
            found.append(
                [_description(t, x) for t in (out if isinstance(out, list | tuple) else [out])]
            )
            assert not time or caching.unknown == before
    assert found[0] == found[1]


def test_gradients_flow_through_outputs_from_the_cache() -> None:
    with FakeTensorMode() as mode, _Caching(mode):
        for _ in range(2):
            x = torch.empty(4, 4, requires_grad=True)
            (x.t() @ x).relu().sum().backward()  # type: ignore[no-untyped-call]
            assert x.grad is not None
            assert x.grad.shape == x.shape


def test_what_does_not_depend_on_shapes_is_not_cached() -> None:
    def run() -> None:
        x = torch.empty(4)
        x.resize_(8)
        assert x.shape == (8,)
        torch.empty(4, dtype=torch.complex64).conj()

    with FakeTensorMode() as mode, _Caching(mode) as caching:
        run()
        before = caching.unknown
        run()
    assert caching.unknown > before


def test_a_sharded_tensor_has_its_part() -> None:
    with fake_ranks(2):
        whole = torch.arange(4.0)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
        assert isinstance(sharded, DTensor)
        assert local_tensor(sharded).shape == (2,)
        assert local_tensor(sharded).data_ptr() == sharded.to_local().data_ptr()
        assert local_tensor(whole) is whole


def test_a_resize_is_told_while_the_method_is_replaced() -> None:
    original = torch.UntypedStorage.resize_
    told = []

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
