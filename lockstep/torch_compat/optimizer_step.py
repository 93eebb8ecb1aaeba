"""Hooks around an optimizer's `step`.

Public torch: hooks can be registered, not listed, nor put before others.
Seen to work: torch 2.11.0 to 2.15.0.
When gone: importing this file raises ImportError; training without the file scales gradients
before each update, in a pass of its own.
"""

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle


def pre_hooks(optimizer: Optimizer) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Return the hooks before an update, which may look at gradients: its own, and everyone's.

    Both follow what is registered later.
    """
    return optimizer._optimizer_step_pre_hooks, _global_optimizer_pre_hooks


def run_first(optimizer: Optimizer, handle: RemovableHandle) -> RemovableHandle:
    """Let a hook around the optimizer's step run before the others of its kind.

    Return its handle.
    """
    every: list[Any] = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    for hooks in every:
        if handle.id in hooks:
            hooks.move_to_end(handle.id, last=False)
    return handle


def remove_step_pre_hooks(optimizer: Optimizer) -> None:
    """Take off what `register_step_pre_hook` registered."""
    optimizer._optimizer_step_pre_hooks.clear()
