"""`lockstep/torch_compat/tensor_versions.py`: a write changes the version, and a view has a base."""

import torch

from lockstep.torch_compat.tensor_versions import base_of, version_of


def test_a_write_changes_the_version() -> None:
    tensor = torch.zeros(4)
    before = version_of(tensor)
    tensor[1:].add_(1)
    assert version_of(tensor) == before + 1


def test_a_view_has_the_tensor_that_it_views() -> None:
    tensor = torch.zeros(4)
    assert base_of(tensor) is None
    assert base_of(tensor.view(2, 2)[0]) is tensor
