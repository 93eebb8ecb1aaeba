"""Runs the user's gradient hooks (`parameter.register_hook`) once a step, on whole gradients.

torch would run them in each backward pass, on the gradient of one micro-batch or of a shard. So
`place` takes them off the model (`take_hooks`), and the step calls them on the gradient of its mean
loss, before it is clipped (`run_hooks`).

Tests: tests/trainer/test_updates.py
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lockstep.errors import UsageError, listed
from lockstep.torch_compat.gradient_hooks import (
    has_hooks_after_accumulation,
    hooks_of,
    remove_hooks,
)

# parameter → what its gradient goes through, in order
GradientHooks = dict[str, list[Callable[[Tensor], Any]]]


def take_hooks(
    model: nn.Module, further: Mapping[str, nn.Parameter] | None = None, *, workers: bool = False
) -> GradientHooks:
    """Remove and return the gradient hooks of a model that is about to be placed.

    Args:
        model: whose parameters have them.
        further: parameters of a loss function.
        workers: models train by themselves, so that there is no gradient of a step.

    Raises:
        UsageError: there are hooks that can't be run once a step.
    """
    named = dict(model.named_parameters()) | dict(further or {})
    if early := [name for name, p in named.items() if has_hooks_after_accumulation(p)]:
        what = f"the parameter {listed(early)} has a hook from register_post_accumulate_grad_hook"
        why = (
            "it would run on a rank's own micro-batches before gradients are reduced, and never"
            " under FSDP"
        )
        fix = (
            "remove it, and let Trainer update; register_hook may change a gradient, Trainer(…,"
            " after_update=…) runs after the update (docs/how_to/teachers.md)"
        )
        raise UsageError(what, why=why, fix=fix)
    hooks: GradientHooks = {
        name: functions for name, p in named.items() if (functions := hooks_of(p))
    }
    if hooks and workers:
        what = f"the parameter {listed(list(hooks))} has a gradient hook"
        why = "under diloco each worker makes an update from a gradient of its own"
        raise UsageError(what, why=why, fix="remove the hook, or use ddp or fsdp")
    for name in hooks:
        remove_hooks(named[name])
    return hooks


@torch.no_grad()
def run_hooks(hooks: GradientHooks, parameters: Mapping[str, nn.Parameter]) -> None:
    """Let gradients, of the mean loss, go through their hooks, whole; all ranks call it."""
    for name, functions in hooks.items():
        parameter = parameters.get(name)
        if parameter is None or parameter.grad is None:
            continue
        grad = parameter.grad
        full = grad.full_tensor() if isinstance(grad, DTensor) else grad
        for function in functions:
            result = function(full)
            full = full if result is None else result
        if full.shape != grad.shape:
            what = (
                f"the gradient hook of {name} returns the shape {list(full.shape)}, and the"
                f" gradient has {list(grad.shape)}"
            )
            raise UsageError(what, fix="return a tensor of the gradient's shape, or None")
        if isinstance(grad, DTensor):
            everywhere = [Replicate()] * grad.device_mesh.ndim
            same = DTensor.from_local(full, grad.device_mesh, everywhere, run_check=False)
            grad.to_local().copy_(same.redistribute(grad.device_mesh, grad.placements).to_local())
        elif full is not grad:
            grad.copy_(full)
