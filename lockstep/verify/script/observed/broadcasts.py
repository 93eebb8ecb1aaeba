"""Finds losses whose predictions and targets broadcast: each sample meets the targets of all.

A prediction of [8, 1] and a target of [8] are compared as [8, 8]. One process computes the same, so
that ranks agree with it or not by what else the loss does: it is said beside the verdict. So do
losses of [8, 1] that the loop multiplies by a mask, by weights or by advantages of [8].

Tests: tests/verify/test_broadcasts.py
"""

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# What torch's own losses say where the shapes differ: mse_loss, l1_loss, smooth_l1_loss, huber_loss
_SIZES = re.compile(
    r"target size \(torch\.Size\(\[([\d, ]*)\]\)\).*input size \(torch\.Size\(\[([\d, ]*)\]\)\)",
    re.DOTALL,
)


def broadcast_in(message: str) -> str:
    """Return what a warning of torch says of a loss that pairs all samples with all targets.

    Empty for one that does not: of shapes with the same number of dims, as those of quantiles, and
    of one that is stretched to the other's, as a target of one number.
    """
    sizes = _SIZES.search(message)
    if sizes is None:
        return ""
    target, given = (
        [int(size) for size in dims.split(",") if size.strip()] for dims in sizes.groups()
    )
    together = _broadcast(given, target)
    has_samples = given[:1] == target[:1]  # both, in their first dim
    if not has_samples or len(given) == len(target) or together in (None, given, target):
        return ""
    return (
        f"a loss is given {given} and the targets {target}, which broadcast to {together}: it"
        " compares each prediction with the targets of other samples, on one process, too"
    )


def watch_losses(report: Callable[[str], None]) -> None:
    """Report each such warning from now on, once for each place, as it is shown."""
    show = warnings.showwarning

    def shown(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        text = broadcast_in(str(message))
        if text:
            report(text)
        show(message, *args, **kwargs)

    setattr(warnings, "showwarning", shown)  # noqa: B010 — mypy forbids to assign a function


def product_in(mine: Tensor, other: Tensor) -> str:
    """Return what is to be said of a product of two tensors in the loop itself; empty: nothing.

    It pairs all samples with all, if both have the same elements but for dims of one, and broadcast
    to more. One is learned from, and the other is not: it is a mask, a weight or an advantage. An
    outer product on purpose is one of two things that are learned, or of two that are not.
    """
    if mine.ndim == other.ndim or mine.requires_grad == other.requires_grad:
        return ""
    given, by = (mine, other) if mine.requires_grad else (other, mine)
    sizes = [[size for size in tensor.shape if size > 1] for tensor in (given, by)]
    if not sizes[0] or sizes[0] != sizes[1]:
        return ""
    shapes = [list(tensor.shape) for tensor in (given, by)]
    together = _broadcast(*shapes)
    if together is None or together in shapes:
        return ""
    return (
        f"{shapes[0]} is multiplied by {shapes[1]}, which broadcast to {together}: each sample"
        " meets the masks or weights of other samples, on one process, too"
    )


def _broadcast(shape: list[int], other: list[int]) -> list[int] | None:
    """Return the shape of two tensors together; None if they do not fit."""
    try:
        together = torch.empty(shape, device="meta") + torch.empty(other, device="meta")
    except RuntimeError:
        return None
    return list(together.shape)
