"""What a rank holds of a tensor, and its bits."""

import pytest
import torch

from lockstep.tensors import as_integers, bytes_of, fingerprint, local, with_other_last_bits


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64]
)
def test_a_fingerprint_is_that_of_the_elements_bits(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    other = tensor.clone()
    other[0, 0] = 1
    assert fingerprint(other) != fingerprint(tensor)
    assert fingerprint(tensor) == fingerprint(tensor.clone()) == as_integers(tensor).sum()
    assert local(tensor) is tensor


def test_last_bits_are_moved_and_no_others() -> None:
    tensor = torch.linspace(1.0, 2.0, 100)
    moved = with_other_last_bits(tensor, torch.Generator().manual_seed(0))
    assert (moved != tensor).all()
    torch.testing.assert_close(moved, tensor, rtol=2.5e-7, atol=0.0)


def test_samples_are_told_apart_by_their_bytes() -> None:
    one = {"x": torch.ones(2), "more": [1, "a"]}
    assert bytes_of(one) == bytes_of({"x": torch.ones(2), "more": [1, "a"]})
    for other in (
        {"x": torch.ones(2, 1), "more": [1, "a"]},
        {"x": torch.ones(2), "more": [1, "b"]},
    ):
        assert bytes_of(one) != bytes_of(other)
