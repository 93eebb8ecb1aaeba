"""`lockstep/torch_compat/muon_steps.py`: the two computations, as torch's Muon makes them."""

import torch

from lockstep.torch_compat.muon_steps import COEFFICIENTS, EPS, adjusted_rate, orthogonal


def test_singular_values_become_about_one() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(6, 4)
    values = torch.linalg.svdvals(orthogonal(matrix, COEFFICIENTS, 5, EPS).float())
    assert values.min() > 0.5
    assert values.max() < 1.5
    assert adjusted_rate(1.0, "match_rms_adamw", matrix.shape) == 0.2 * 6**0.5
