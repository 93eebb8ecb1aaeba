"""Tensors with a shape, a dtype and a device, and no memory.

Public torch: tensors on meta have no device of their own, and their storages no bytes to count.
Seen to work: torch 2.13.0.
When gone: importing this file raises ImportError: no `lockstep plan`, and no model `mixture`.
"""

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

# Raised where a program asks a fake tensor for its values.
UNKNOWN_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

__all__ = ["UNKNOWN_VALUES", "FakeTensor", "FakeTensorMode"]
