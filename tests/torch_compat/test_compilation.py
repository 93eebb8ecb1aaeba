"""`lockstep/torch_compat/compilation.py`: what runs to be recorded is told from what runs for its
results.
"""

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lockstep.torch_compat.compilation import is_traced


def test_what_is_recorded_is_told_from_what_is_computed() -> None:
    seen = []

    def body(x: Tensor) -> Tensor:
        seen.append(is_traced())
        return x + 1

    body(torch.ones(2))
    make_fx(body)(torch.ones(2))
    assert seen == [False, True]
