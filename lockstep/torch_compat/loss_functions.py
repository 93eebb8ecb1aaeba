"""`torch.nn.functional`'s names, which are replaced while the calls of loss functions are noted.

Public torch: `TorchFunctionMode` sees every function and every method of a tensor, 10 µs a call; a
loss needs a few. Seen to work: torch 2.11.0 to 2.15.0. When gone: a loss function that `torch.nn`
no longer calls by its name there is not noted, and losses that are means are weighted by samples;
`tests/torch_compat/test_loss_functions.py` compares each.
"""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lockstep.torch_compat.dispatch_mode import without_modes

_ROUNDING = 1e-6  # relative

NAMES: dict[str, Any] = vars(F)


def is_mean(loss: Any) -> bool:
    """Return whether a loss is a mean that nothing divides or weighs.

    A loss function or `mean()` returns it, or a sum is divided by its number of terms. The numbers
    by which it is multiplied and divided are followed down to that: of 6 terms, `2 * x.sum() / 12`
    is a mean, and `x.mean() / 4` is not.
    """
    node = loss.grad_fn
    times = 1.0
    while node is not None:
        name = node.name()
        if name.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == 1:
            return abs(times - 1) < _ROUNDING
        if name == "SumBackward0":
            terms = float(math.prod(node._saved_self_sym_sizes))
            return abs(times * terms - 1) < _ROUNDING
        if name in ("MulBackward0", "DivBackward0"):
            number = _number(node)
            if not number:
                return False
            times = times * number if name == "MulBackward0" else times / number
        elif name != "NegBackward0":
            return False
        node = node.next_functions[0][0]
    return False


def _number(node: Any) -> float:
    """Return the number that a tensor was multiplied or divided by; 0 if it is no such number."""
    other = node._saved_other
    is_number = isinstance(other, Tensor) and other.ndim == 0 and other.device.type == "cpu"
    if not is_number or other.requires_grad:
        return 0.0
    # A mode would be given a Python number in place of the tensor that autograd has saved.
    return abs(float(without_modes(float, (other,), {})))
