"""Numbers of a step, which are tensors where reading them would wait for the device, and plain floats on the CPU.

Arithmetic is the same text for both; a 0-dim tensor costs ten to fifty times what a float does.
"""

import math

import torch
from torch import Tensor

Number = float | Tensor


def number(tensor: Tensor) -> Number:
    """A 0-dim tensor as it is calculated with from here on: on the CPU a float."""
    return tensor.item() if tensor.device.type == "cpu" else tensor


def at_least(value: Number, bound: float) -> Number:
    """The larger of the two."""
    return value.clamp(min=bound) if isinstance(value, Tensor) else max(value, bound)


def at_most(value: Number, bound: float) -> Number:
    """The smaller of the two."""
    return value.clamp(max=bound) if isinstance(value, Tensor) else min(value, bound)


def inverse(value: Number) -> Number:
    """1 / `value`; infinite where it is 0."""
    return value.reciprocal() if isinstance(value, Tensor) else 1.0 / value if value else math.inf


def exceeds(value: Number, bound: float) -> Number:
    """1 where `value` > `bound`, else 0."""
    return (value > bound).float() if isinstance(value, Tensor) else float(value > bound)


def tensor_of(value: Number) -> Tensor:
    """0-dim, float32, on the device that the number came from."""
    return value.float() if isinstance(value, Tensor) else torch.scalar_tensor(value, dtype=torch.float32)
