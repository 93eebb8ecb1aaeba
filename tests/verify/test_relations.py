"""A wrong tensor's relation to the right one is recognised, and none is claimed that does not hold."""

import pytest
import torch
from torch import Tensor

from lockstep.verify.comparisons import relation

RIGHT = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
OTHER = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
PARTLY = RIGHT.clone()
PARTLY[2] = 0
PLACES = torch.arange(8)


@pytest.mark.parametrize(
    ("mine", "right", "how"),
    [
        (2 * RIGHT, RIGHT, "is 2 × the reference"),
        (RIGHT / 3, RIGHT, "is 1/3 of the reference"),
        (-RIGHT, RIGHT, "is -1 × the reference"),
        (0 * RIGHT, RIGHT, "is 0"),
        (RIGHT / 0, RIGHT, "is not finite"),
        (RIGHT.T, RIGHT, "is the reference, transposed"),
        (RIGHT.roll(1, 1), RIGHT, "is the reference shifted by 1 along dim 1"),
        (RIGHT.flip(0), RIGHT, "has the reference's values in another order"),
        (RIGHT.bfloat16().float(), RIGHT, "is rounded to bfloat16"),
        (PARTLY, RIGHT, "is 0 in 4 of 16 elements, else the reference"),
        (PLACES + 3, PLACES, "is the reference + 3"),
        (OTHER, RIGHT, "is another"),
        (RIGHT[:2], RIGHT, "has the shape [2, 4] instead of [4, 4]"),
        (RIGHT + 0.1 * RIGHT.square(), RIGHT, "differs by "),
    ],
)
def test_a_relation_is_named_if_it_holds(mine: Tensor, right: Tensor, how: str) -> None:
    assert relation(mine, right, {"another": OTHER}).startswith(how)
