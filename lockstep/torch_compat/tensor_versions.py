"""Detects writes to a tensor, and finds the tensor that it is a view of.

Public torch: none; autograd compares versions by itself, and raises only where a gradient needs the old values.
Seen to work: torch 2.11.0 to 2.15.0.
When gone: AttributeError, in the first step of a model with buffers or under a pipeline.
"""

from torch import Tensor


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor's memory was written in place."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of, if autograd knows it as one."""
    return tensor._base
