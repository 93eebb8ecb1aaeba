"""Numbers of a step: tensors where reading them would wait for the device, plain floats on the CPU.

The same code calculates with both; a 0-dim tensor costs ten to fifty times what a float does.
"""

import math

import torch
from torch import Tensor

Number = float | Tensor


def number(tensor: Tensor) -> Number:
    """Return a 0-dim tensor as a float if it is on the CPU, else unchanged."""
    return tensor.item() if tensor.device.type == "cpu" else tensor


def at_least(value: Number, bound: float) -> Number:
    """Return the larger of the two."""
    return value.clamp(min=bound) if isinstance(value, Tensor) else max(value, bound)


def at_most(value: Number, bound: float) -> Number:
    """Return the smaller of the two."""
    return value.clamp(max=bound) if isinstance(value, Tensor) else min(value, bound)


def inverse(value: Number) -> Number:
    """Return 1 / `value`; infinity where it is 0."""
    return value.reciprocal() if isinstance(value, Tensor) else 1.0 / value if value else math.inf


def exceeds(value: Number, bound: float) -> Number:
    """Return 1 where `value` > `bound`, else 0."""
    return (value > bound).float() if isinstance(value, Tensor) else float(value > bound)


def tensor_of(value: Number) -> Tensor:
    """Return a 0-dim float32 tensor on the device that the number came from."""
    return value.float() if isinstance(value, Tensor) else torch.scalar_tensor(value, dtype=torch.float32)
