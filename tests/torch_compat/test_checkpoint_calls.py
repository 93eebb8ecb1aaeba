"""`lockstep/torch_compat/checkpoint_calls.py`: calls are found while they run, and are
told apart.
"""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lockstep.torch_compat.checkpoint_calls import inputs_need_gradients, open_checkpoints


def test_calls_are_found_while_they_run() -> None:
    x = torch.ones(2, requires_grad=True)
    for reentrant in (False, True):
        found = []

        def inner(y: Tensor, found: list[object] = found) -> Tensor:
            calls = open_checkpoints()
            found.append((calls, [inputs_need_gradients(call) for call in calls]))
            return y * 2

        def outer(y: Tensor, reentrant: bool = reentrant, inner: object = inner) -> Tensor:
            return checkpoint(inner, y.detach(), use_reentrant=reentrant)

        checkpoint(outer, x, use_reentrant=reentrant)
        checkpoint(inner, x, use_reentrant=reentrant)
        (nested, needs), (alone, _) = found
        assert needs == [False, True]
        assert len(alone) == 1
        assert alone[0] not in nested
    assert open_checkpoints() == []
