import pytest
import torch

from lockstep.models.attention import phases, rotate


def test_products_depend_on_distance_alone() -> None:
    q = torch.randn(1, 8).expand(9, 8)
    k = torch.randn(1, 8).expand(9, 8)
    cos, sin = phases(torch.arange(9), 8, 100.0)
    scores = rotate(q, cos, sin) @ rotate(k, cos, sin).T
    torch.testing.assert_close(scores[3, 1], scores[8, 6])
    torch.testing.assert_close(scores[0, 0], scores[5, 5])
    assert not torch.isclose(scores[3, 1], scores[3, 2])


def test_neighbours_turn_together() -> None:
    cos, sin = phases(torch.arange(3), 4, 100.0)
    turned = rotate(torch.tensor([[1.0, 0.0, 0.0, 1.0]]).expand(3, 4), cos, sin)
    angle = torch.tensor([2.0, 2.0 / 10])  # position 2; theta^(−2/4) = 1/10
    expected = torch.stack((angle[0].cos(), angle[0].sin(), -angle[1].sin(), angle[1].cos()))
    torch.testing.assert_close(turned[2], expected)


def test_its_gradient_is_right() -> None:
    cos, sin = phases(torch.arange(3), 6, 100.0)
    x = torch.randn(2, 3, 6, requires_grad=True)
    weights = torch.randn(2, 3, 6)
    (gradient,) = torch.autograd.grad((rotate(x, cos, sin) * weights).sum(), x)
    matrix = torch.autograd.functional.jacobian(lambda y: rotate(y, cos, sin), torch.zeros(2, 3, 6))
    torch.testing.assert_close(gradient, torch.einsum("abc,abcdef->def", weights, matrix))
    finite = (rotate(x + 0.5, cos, sin) - rotate(x - 0.5, cos, sin)).mul(weights).sum()
    torch.testing.assert_close(gradient.sum(), finite)  # linear: differences are exact


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_trap_20_angles_stay_float32(dtype: torch.dtype) -> None:
    """In bf16 position 257 equals position 256, and far tokens fall together."""
    with torch.autocast("cpu", dtype=dtype):
        cos, sin = phases(torch.arange(300), 8, 10_000.0)
        turned = rotate(torch.ones(300, 8, dtype=dtype), cos, sin)
    assert cos.dtype == sin.dtype == torch.float32
    assert turned.dtype == dtype
    exact = (
        torch.arange(300, dtype=torch.float64)[:, None] * 10_000.0 ** (-torch.arange(0, 8, 2) / 8)
    ).cos()
    torch.testing.assert_close(cos.double(), exact, rtol=0, atol=3e-5)
