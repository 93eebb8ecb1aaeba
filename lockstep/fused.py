"""Fused optimizers bring gradients to scale in the pass in which they update, so that no pass of its own is needed.

They do it for `torch.amp.GradScaler`, by an attribute that it sets. That attribute and the lists of hooks, which torch
calls private, are named in this file alone.
"""

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from lockstep.parallel.numbers import Number, inverse, tensor_of

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
        optimizer.step()
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
