"""`lockstep/torch_compat/mps_generator.py`: torch has the function, without arguments."""

import inspect

import pytest
import torch

from lockstep.torch_compat import mps_generator


def test_torch_has_the_function() -> None:
    assert not inspect.signature(torch.mps._get_default_mps_generator).parameters


@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs MPS")
def test_it_is_the_one_that_random_functions_use() -> None:
    mps_generator.default().manual_seed(1)
    first = torch.rand(4, device="mps").cpu()
    mps_generator.default().manual_seed(1)
    assert torch.equal(first, torch.rand(4, device="mps").cpu())
