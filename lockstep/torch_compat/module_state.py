"""What decides about a module's `state_dict` beside its tensors.

Hooks, and buffers that are left out.

Public torch: hooks can be registered, and buffers be declared not persistent; neither can be
listed. Seen to work: torch 2.13.0. When gone: AttributeError as a model is placed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn


def persistent_buffers(model: nn.Module) -> set[str]:
    """Return the names of the buffers that a `state_dict` holds, whatever hooks make of it.

    All names of tied ones.
    """
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


@dataclass(frozen=True)
class RegisteredState:
    """Holds the hooks on a model's modules that decide about its `state_dict`."""

    persistent: frozenset[str]  # names of the buffers that it holds; all names of tied ones
    # name of a module → functions that run when its state is taken or loaded
    hooks: dict[str, list[Any]]


def registered_state(model: nn.Module) -> RegisteredState:
    """Return the persistent buffers of a model and the hooks on its state, by name."""
    hooks = {
        name: [hook for registry in _registries(module) for hook in registry.values()]
        for name, module in model.named_modules()
    }
    return RegisteredState(frozenset(persistent_buffers(model)), hooks)


@contextmanager
def without_hooks_of_fsdp(model: nn.Module) -> Iterator[None]:
    """Take off, for the block, FSDP2's hooks around a state that is taken or loaded.

    They look for its shards.
    """
    kept = [
        (registry, dict(registry))
        for module in model.modules()
        for registry in _registries(module)
        if registry
    ]
    for registry, hooks in kept:
        for key, hook in hooks.items():
            if str(getattr(hook, "__module__", "")).startswith("torch.distributed."):
                del registry[key]
    try:
        yield
    finally:
        for registry, hooks in kept:
            registry.clear()
            registry.update(hooks)


def _registries(module: nn.Module) -> tuple[dict[int, Any], ...]:
    on_saving = module._state_dict_pre_hooks, module._state_dict_hooks
    return *on_saving, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks
