"""`lockstep/torch_compat/fake_tensors.py`: tensors made inside have a device and bytes, and no memory."""

import torch

from lockstep.torch_compat.fake_tensors import FakeTensorMode


def test_tensors_made_inside_hold_nothing() -> None:
    real = torch.ones(2, 3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        huge = torch.empty(1 << 40, device="cpu")
        assert (huge.device.type, huge.untyped_storage().nbytes()) == ("cpu", 1 << 42)
        assert (real @ torch.empty(3, 4)).shape == (2, 4)
