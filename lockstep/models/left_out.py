"""Losses of micro-batches that leave out all targets, or those of one term and not another.

Tests: tests/trainer/test_no_targets.py
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.torch_compat.pytree import tree_flatten


def refuse_uneven(divisors: tuple[int, ...]) -> None:
    """Refuse a loss whose terms are means over different numbers of targets.

    Where a step has several micro-batches, no single number would weigh them.
    """
    what = (
        f"the loss has {len(divisors)} terms that leave out different targets of a micro-batch:"
        f" they are means over {', '.join(map(str, divisors[:-1]))} and {divisors[-1]}"
    )
    why = (
        "each term would need the number of its own targets in the whole step: no one number weighs"
        " micro-batches"
    )
    fix = (
        "let all terms leave out the same targets (of answers in texts: drop those of which one end"
        " lies outside); or take a step of one micro-batch; or give the model count(batch), by"
        " which all terms are to be weighed"
    )
    raise UsageError(what, where="the loss", why=why, fix=fix)


def sum_of_outputs(outputs: Any, loss: Tensor) -> Tensor:
    """Return the sum of a model's outputs besides its loss; the loss if there are none."""
    leaves = [
        leaf
        for leaf in tree_flatten(outputs)[0]
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.ndim
    ]
    return torch.stack([leaf.float().sum() for leaf in leaves]).sum() if leaves else loss


def stop_gradients_unless(condition: Tensor, outputs: Any) -> None:
    """Make the gradient of the outputs zero where a 0-dim condition does not hold.

    The gradient of 0/0 would not be a number.
    """

    def stop(gradient: Tensor) -> Tensor:
        return torch.where(condition.to(gradient.device), gradient, 0.0)

    for leaf in tree_flatten(outputs)[0]:
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaf.register_hook(stop)  # type: ignore[no-untyped-call]
