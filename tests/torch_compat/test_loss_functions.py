"""`lockstep/torch_compat/loss_functions.py`: `torch.nn` calls loss functions by the names that are
replaced.
"""

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.models.observed import LossCalls
from lockstep.torch_compat.loss_functions import NAMES

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
