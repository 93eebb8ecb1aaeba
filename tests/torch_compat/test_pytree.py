"""`lockstep/torch_compat/pytree.py`: containers come apart into leaves in their order, and together
again.
"""

import torch

from lockstep.torch_compat.pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)


def test_containers_come_apart_and_together() -> None:
    tree = {"a": [1, (torch.tensor(2),)], "b": None}
    leaves, spec = tree_flatten(tree)
    assert isinstance(spec, TreeSpec)
    assert leaves == tree_leaves(tree) == [1, torch.tensor(2), None]
    assert tree_unflatten(leaves, spec) == tree
    assert tree_map(str, tree) == {"a": ["1", ("tensor(2)",)], "b": "None"}
    assert tree_map_only(torch.Tensor, int, tree) == {"a": [1, (2,)], "b": None}


def test_equal_structures_compare_equal() -> None:
    assert (
        tree_flatten([1, {"a": 2}])[1] == tree_flatten([3, {"a": 4}])[1] != tree_flatten([1, 2])[1]
    )


def test_exported_programs_describe_their_inputs_by_it() -> None:
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    assert isinstance(exported.call_spec.in_spec, TreeSpec)
