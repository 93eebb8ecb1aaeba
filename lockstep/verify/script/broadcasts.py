"""Finds losses whose predictions and targets broadcast: each sample meets the targets of all.

A prediction of [8, 1] and a target of [8] are compared as [8, 8]. One process computes the same, so
that ranks agree with it or not by what else the loss does: it is said beside the verdict.

Tests: tests/verify/test_broadcasts.py
"""

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch

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
    try:
        together = list(
            (torch.empty(given, device="meta") + torch.empty(target, device="meta")).shape
        )
    except RuntimeError:  # the loss itself fails
        return ""
    has_samples = given[:1] == target[:1]  # both, in their first dim
    if not has_samples or len(given) == len(target) or together in (given, target):
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
