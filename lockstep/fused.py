"""Fused optimizers bring gradients to scale in the pass in which they update, so that no pass of its own is needed.

They do it for `torch.amp.GradScaler`, by an attribute that it sets.
"""

import torch
from torch.optim import Optimizer

from lockstep.parallel.numbers import Number, inverse, tensor_of
from lockstep.torch_compat.optimizer_step import bare_step, has_pre_hooks

_SCALING = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad}


def scales(optimizer: Optimizer) -> bool:
    """Whether its update can multiply the gradients itself: it is fused, and no hook looks at them before."""
    if type(optimizer) not in _SCALING or has_pre_hooks(optimizer):
        return False
    for group in optimizer.param_groups:  # noqa: SIM110 — this is called in each step, and generators are slower
        if not group["fused"]:
            return False
    return True


def step_times(optimizer: Optimizer, factor: Number) -> None:
    """An update by the gradients times `factor`."""
    optimizer.grad_scale = tensor_of(inverse(factor))  # type: ignore[attr-defined]
    try:
        bare_step(optimizer)()
    finally:
        del optimizer.grad_scale  # type: ignore[attr-defined]
