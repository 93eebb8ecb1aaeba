"""Hooks around an optimizer's `step`.

And the step without what torch puts around it for hooks and profilers.

Public torch: hooks can be registered, not listed, and every step runs them inside of a label for
the profiler. Without that a step of 0.8 ms (five small layers, fused AdamW, CPU) is 8 % shorter: 98
µs for the update rather than 165 µs. Seen to work: torch 2.11.0 to 2.15.0. When gone: importing
this file raises ImportError; training without the file calls `optimizer.step` and scales gradients
before it. If torch wraps a step in another way, `bare_step` returns `optimizer.step`: right, and
slower.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.hooks import RemovableHandle

_LABELLED = Optimizer.profile_hook_step(lambda: None).__code__


def has_pre_hooks(optimizer: Optimizer) -> bool:
    """Return whether a hook looks at the gradients before an update."""
    return bool(optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks)


def bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """Return `optimizer.step` without what torch puts around it.

    That is left on where there is a hook after it, or a profiler.
    """
    step: Any = type(optimizer).step
    hooked = optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks
    replaced = "step" in vars(optimizer) or getattr(step, "__code__", None) is not _LABELLED
    if hooked or replaced or _profiler_enabled():
        return optimizer.step
    return partial(step.__wrapped__, optimizer)


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
