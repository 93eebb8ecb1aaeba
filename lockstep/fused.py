"""Fused optimizers bring gradients to scale in the pass in which they update, so that no pass of its own is needed.

They do it for `torch.amp.GradScaler`, by an attribute that it sets. Around every optimizer's `step` torch puts hooks
and a label for its profiler, which takes longer than all else that happens there on the host: it is left out where
there is no hook, and no profiler to read it. The attribute, the lists of hooks and the question about the profiler,
which torch calls private, are named in this file alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lockstep.parallel.numbers import Number, inverse, tensor_of

_LABELLED = Optimizer.profile_hook_step(lambda: None).__code__
_SCALING = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad}


def scales(optimizer: Optimizer) -> bool:
    """Whether its update can multiply the gradients itself: it is fused, and no hook looks at them before."""
    if type(optimizer) not in _SCALING or optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
        return False
    for group in optimizer.param_groups:  # noqa: SIM110 — this is called in each step, and generators are slower
        if not group["fused"]:
            return False
    return True


def step_times(optimizer: Optimizer, factor: Number) -> None:
    """An update by the gradients times `factor`."""
    optimizer.grad_scale = tensor_of(inverse(factor))  # type: ignore[attr-defined]
    try:
        _bare_step(optimizer)()
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]


def _bare_step(optimizer: Optimizer) -> Callable[[], Any]:
    """`optimizer.step`, without what torch puts around it where nobody would notice."""
    step: Any = type(optimizer).step
    hooked = optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks
    replaced = "step" in vars(optimizer) or getattr(step, "__code__", None) is not _LABELLED
    if hooked or replaced or _profiler_enabled():
        return optimizer.step
    return partial(step.__wrapped__, optimizer)
