"""The tensor that a DTensor holds on this rank, without an operation.

Public torch: `DTensor.to_local()` is an operation of autograd, which a dispatch mode would count.
Seen to work: torch 2.13.0.
When gone: `lockstep plan` takes a sharded tensor for a whole one.
"""

from typing import Any

from torch import Tensor


def local_tensor(tensor: Any) -> Tensor:
    """Return what the tensor holds on this rank; a plain tensor itself."""
    return getattr(tensor, "_local_tensor", tensor)  # type: ignore[no-any-return]
