"""Tensors that are views of others, returned as the same memory without a base.

Public torch: nothing says whether a tensor is a view.
Seen to work: torch 2.13.0.
When gone: AttributeError at the first forward pass under FSDP, and `tests/torch_compat` says so.
"""

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.torch_compat.pytree import tree_leaves, tree_map_only


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
    """Let a module, not wrapped yet, return no views: FSDP2's hook on one is lost if it is changed in place."""

    def replaced(_module: nn.Module, _args: Any, outputs: Any) -> Any:
        if any(map(_is_view, tree_leaves(outputs))):
            same: Any = _Same.apply
            return tree_map_only(Tensor, lambda leaf: same(leaf) if _is_view(leaf) else leaf, outputs)
        return None

    root.register_forward_hook(replaced)
