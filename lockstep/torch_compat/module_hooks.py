"""The hooks of a module.

Whether it has any, those around its forward pass, and those of its gradients.

Public torch: hooks can be registered, not listed.
Seen to work: torch 2.11.0 to 2.15.0.
When gone: AttributeError as a model is placed.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as of_all_modules


def has_hooks(module: nn.Module, *, but: Any = None) -> bool:
    """Return whether a hook other than `but` looks at the module.

    Hooks see its inputs, outputs or gradients.
    """
    before = [hook for hook in module._forward_pre_hooks.values() if hook is not but]
    return bool(module._forward_hooks or before or module._backward_hooks)


def hooks_on(module: nn.Module) -> list[Mapping[int, Any]]:
    """Return the mappings that hold a module's hooks, as they are now and later."""
    return [
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    ]


def global_hooks() -> list[Mapping[int, Any]]:
    """Return the mappings that hold the hooks on all modules, as they are now and later."""
    return [
        of_all_modules._global_forward_pre_hooks,
        of_all_modules._global_forward_hooks,
        of_all_modules._global_backward_pre_hooks,
        of_all_modules._global_backward_hooks,
    ]


def forward_pre_hooks(module: nn.Module) -> Iterable[Any]:
    """Return the hooks before its forward pass, in order."""
    return module._forward_pre_hooks.values()


def forward_hooks(module: nn.Module) -> Iterable[Any]:
    """Return the hooks after its forward pass, in order."""
    return module._forward_hooks.values()


def remove_backward_hooks(module: nn.Module) -> None:
    """Take off the hooks on gradients that enter or leave the module."""
    module._backward_hooks.clear()
    module._backward_pre_hooks.clear()
