"""`lockstep/torch_compat/loss_functions.py`: `torch.nn` calls loss functions by the names that are
replaced.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.observed import LossCalls
from lockstep.torch_compat.loss_functions import NAMES, is_mean
from lockstep.verify.operation_modes import MeanDraws

_SCORES = torch.randn(4, 3)
_TARGETS = torch.tensor([0, 1, 2, 0])


def test_the_names_are_those_of_torchs_module() -> None:
    assert NAMES is vars(torch.nn.functional)


@pytest.mark.parametrize(
    ("module", "target"),
    [
        (nn.CrossEntropyLoss(), _TARGETS),
        (nn.NLLLoss(), _TARGETS),
        (nn.MSELoss(), torch.zeros(4, 3)),
        (nn.L1Loss(), torch.zeros(4, 3)),
        (nn.BCEWithLogitsLoss(), torch.zeros(4, 3)),
        (nn.SmoothL1Loss(), torch.zeros(4, 3)),
        (nn.HuberLoss(), torch.zeros(4, 3)),
        (nn.KLDivLoss(reduction="batchmean"), torch.zeros(4, 3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_module_that_computes_a_loss_is_noted(module: nn.Module, target: Any) -> None:
    with LossCalls() as calls:
        module(_SCORES, target)
    assert len(calls.means) == 1


@pytest.mark.parametrize(
    ("loss", "right"),
    [
        (lambda x: x.mean(), True),
        (lambda x: -x.mean(), True),
        (lambda x: F.mse_loss(x, torch.zeros(6)), True),
        (lambda x: 1.0 * -x.sum() / len(x), True),
        (lambda x: x.sum() / torch.tensor(6.0), True),
        (lambda x: x.sum(), False),
        (lambda x: x.mean() / 2, False),
        (lambda x: x.sum() / 6 / 4, False),
        (lambda x: x.sum() * 0.5, False),
        (lambda x: x.mean() + x.sum(), False),
        (lambda x: x.mean() * x[0], False),
    ],
)
def test_a_mean_is_told_from_what_divides_it(loss: Callable[[Tensor], Tensor], right: bool) -> None:
    assert is_mean(loss(torch.arange(6.0, requires_grad=True))) == right
    with MeanDraws():
        assert is_mean(loss(torch.arange(6.0, requires_grad=True))) == right
