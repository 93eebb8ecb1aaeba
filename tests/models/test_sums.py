"""Sums whose bits do not depend on how many positions stand beside each other."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.models.bdh import BDHLayer
from lockstep.models.sums import logsumexp_in_order, sum_in_order
from lockstep.parallel.tensor.layer_cut import LayerCut
from lockstep.parallel.tensor.loss_parallel import cut_token_losses

_FEW = 48  # positions; 16 of them are left over where 32 are taken at a time


def test_they_are_those_of_torch_and_so_are_their_gradients() -> None:
    torch.manual_seed(0)
    parts = torch.randn(5, 7, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(sum_in_order(parts), parts.sum(0))
    torch.testing.assert_close(logsumexp_in_order(parts), parts.logsumexp(0))
    assert torch.autograd.gradcheck(sum_in_order, (parts,))
    assert torch.autograd.gradcheck(logsumexp_in_order, (parts,))
    nothing = torch.full((2, 3), -torch.inf)
    assert logsumexp_in_order(nothing).tolist() == [-torch.inf] * 3
    halves = torch.ones(3, 2, dtype=torch.bfloat16, requires_grad=True)
    total = sum_in_order(halves, torch.float32)
    total.sum().backward()
    assert total.dtype == torch.float32
    assert halves.grad is not None
    assert halves.grad.dtype == torch.bfloat16


def _losses(x: Tensor) -> Tensor:
    """Of logits [positions, 64], whose vocabulary is computed in eight blocks."""
    targets = torch.arange(len(x))[None] % 64
    cut = LayerCut(None, 8, sequence=False)
    return cut_token_losses(x[None], targets, cut, (0.1, 0.02))


def _heads(x: Tensor) -> Tensor:
    """Of eight heads of BDH, [positions, 8, 1] → [positions, 1]."""
    return BDHLayer(0.0).leave(x.movedim(1, 0).contiguous())


@pytest.mark.parametrize(
    ("compute", "shape"),
    [(_losses, (64,)), (_heads, (8, 1)), (lambda x: logsumexp_in_order(x.t().contiguous()), (8,))],
)
def test_a_position_has_the_same_bits_among_few_and_many(
    compute: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    """With torch's own sums a few of the 48 have others."""
    torch.manual_seed(0)
    x = 3 * torch.randn(2 * _FEW, *shape)
    assert torch.equal(compute(x)[:_FEW], compute(x[:_FEW]))
