"""Nested containers of tensors, taken apart and put together.

Lists, tuples, mappings, registered classes.

Public torch: nothing before `torch.utils.pytree`, which torch 2.13 does not have. `torch.export`
describes inputs and outputs by these very classes, so a library of another author would not do for
traced models. Seen to work: torch 2.11.0 to 2.15.0. When gone: importing this file raises
ImportError.
"""

from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
