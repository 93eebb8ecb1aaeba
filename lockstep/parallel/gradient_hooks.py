"""Hooks on parameters: `parameter.register_hook(function)`.

A hook expects the whole gradient of the loss, and in a distributed backward pass would see one micro-batch's, or none.
So hooks are removed when a model is placed, and called once a step, on the gradient of the step's mean loss, before it
is clipped, as in a plain loop over the whole batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lockstep.errors import UsageError, listed
from lockstep.torch_compat.gradient_hooks import has_hooks_after_accumulation, hooks_of, remove_hooks

GradientHooks = dict[str, list[Callable[[Tensor], Any]]]  # parameter → what its gradient goes through, in order


def take_hooks(model: nn.Module, *, workers: bool = False) -> GradientHooks:
    """Remove and return the gradient hooks of a model that is about to be placed.

    If `workers` train by themselves on its parameters, there is no gradient of a step, and hooks are refused.
    """
    named = dict(model.named_parameters())
    if early := [name for name, p in named.items() if has_hooks_after_accumulation(p)]:
        raise UsageError(
            f"the parameter {listed(early)} has a hook from register_post_accumulate_grad_hook",
            why="it would run on a rank's own micro-batches before gradients are reduced, and never under FSDP",
            fix="remove it, and let Trainer update; register_hook may change a gradient, Trainer(…, after_update=…) "
            "runs after the update (docs/how_to/teachers.md)",
        )
    hooks: GradientHooks = {name: found for name, p in named.items() if (found := hooks_of(p))}
    if hooks and workers:
        raise UsageError(
            f"the parameter {listed(list(hooks))} has a gradient hook",
            why="under diloco each worker makes an update from a gradient of its own",
            fix="remove the hook, or use ddp or fsdp",
        )
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
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        for function in functions:
            result = function(whole)
            whole = whole if result is None else result
        if whole.shape != grad.shape:
            raise UsageError(
                f"the gradient hook of {name} returns the shape {list(whole.shape)}, and the gradient has "
                f"{list(grad.shape)}",
                fix="return a tensor of the gradient's shape, or None",
            )
        if isinstance(grad, DTensor):
            everywhere = [Replicate()] * grad.device_mesh.ndim
            same = DTensor.from_local(whole, grad.device_mesh, everywhere, run_check=False)
            grad.to_local().copy_(same.redistribute(grad.device_mesh, grad.placements).to_local())
        elif whole is not grad:
            grad.copy_(whole)
