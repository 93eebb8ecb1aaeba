"""The hooks on a tensor's gradient: listed, and taken off.

Public torch: hooks can be registered; only who registered one holds the handle that removes it.
Seen to work: torch 2.11.0 to 2.15.0. When gone: AttributeError as a model is placed; of hooks after
accumulation, which are refused, none is found.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def hooks_of(tensor: Tensor) -> list[Callable[[Tensor], Any]]:
    """Return what `register_hook` registered, in order."""
    return list(tensor._backward_hooks.values()) if tensor._backward_hooks else []


def remove_hooks(tensor: Tensor) -> None:
    """Take off what `register_hook` registered."""
    tensor._backward_hooks = None


def has_hooks_after_accumulation(tensor: Tensor) -> bool:
    """Return whether `register_post_accumulate_grad_hook` registered something."""
    return bool(getattr(tensor, "_post_accumulate_grad_hooks", None))
