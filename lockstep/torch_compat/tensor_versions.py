"""Detects writes to a tensor, and finds the tensor that it is a view of.

It also returns the same memory without a base.

Public torch: none; autograd compares versions by itself, and raises only where a gradient needs the
old values. Seen to work: torch 2.11.0 to 2.15.0. When gone: AttributeError, in the first step of a
model with buffers, under a pipeline, or under FSDP.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.torch_compat.pytree import tree_leaves, tree_map_only


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor's memory was written in place."""
    return tensor._version


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that this one is a view of, if autograd knows it as one."""
    return tensor._base


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def _is_view(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad and leaf._base is not None


def return_no_views(root: nn.Module) -> None:
    """Let a module that is not wrapped yet return no views.

    FSDP2's hook on one is lost if it is changed in place.
    """

    def replaced(_module: nn.Module, _args: Any, outputs: Any) -> Any:
        if any(map(_is_view, tree_leaves(outputs))):
            same: Any = _Same.apply
            return tree_map_only(
                Tensor, lambda leaf: same(leaf) if _is_view(leaf) else leaf, outputs
            )
        return None

    root.register_forward_hook(replaced)
