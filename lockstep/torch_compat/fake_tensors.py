"""Tensors with a shape, a dtype and a device, and no memory; what counts the bytes that they would take.

Public torch: tensors on meta have no device of their own, and their storages no bytes to count. `DTensor.to_local()` is
an operation of autograd, which a dispatch mode would count. FSDP2 frees gathered parameters by a storage's `resize_`,
which no dispatch mode sees, so it is replaced on the class.
Seen to work: torch 2.13.0.
When gone: importing this file raises ImportError: no `lockstep plan`, and no model `mixture`. Or the plan takes a
sharded tensor for a whole one, and gathered parameters as if they were never freed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# Raised where a program asks a fake tensor for its values.
UNKNOWN_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

__all__ = ["UNKNOWN_VALUES", "FakeTensor", "FakeTensorMode", "local_tensor", "resizes_watched"]


def local_tensor(tensor: Any) -> Tensor:
    """Return what the tensor holds on this rank, without an operation; a plain tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)  # type: ignore[no-any-return]


@contextmanager
def resizes_watched(resized: Callable[[Any], None]) -> Iterator[None]:
    """Call `resized(storage)` after each change of a storage's size, while the block runs."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: Any) -> Any:
        result = original(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]
