"""`torch.nn.functional`'s names, which are replaced while the calls of loss functions are noted.

Public torch: `TorchFunctionMode` sees every function and every method of a tensor, 10 µs a call; a
loss needs a few. Seen to work: torch 2.11.0 to 2.15.0. When gone: a loss function that `torch.nn`
no longer calls by its name there is not noted, and losses that are means are weighted by samples;
`tests/torch_compat/test_loss_functions.py` compares each.
"""

from typing import Any

import torch.nn.functional as F

NAMES: dict[str, Any] = vars(F)


def is_mean(loss: Any) -> bool:
    """Return whether a loss is a mean as a loss function, or `mean()`, returns it.

    Nothing divides or weighs it.
    """
    node = loss.grad_fn
    if node is None:
        return False
    return node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == 1
