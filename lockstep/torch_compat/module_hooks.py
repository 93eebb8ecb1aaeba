"""The hooks of a module: whether it has any, and those before its forward pass.

Public torch: hooks can be registered, not listed.
Seen to work: torch 2.11.0 to 2.15.0.
When gone: AttributeError as a model is placed.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Return whether something looks at the module's inputs, outputs or gradients."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def forward_pre_hooks(module: nn.Module) -> Iterable[Any]:
    """Return the hooks before its forward pass, in order."""
    return module._forward_pre_hooks.values()
