"""Turns loss functions of `torch.nn.functional` into objects of torch's loss classes.

The classes say what they divide by.

Tests: tests/trainer/test_loss_check.py, tests/trainer/test_no_targets.py
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from lockstep.errors import UsageError

# Those that are called with (outputs, targets).
_CLASSES: dict[Callable[..., Any], type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.kl_div: nn.KLDivLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
    F.hinge_embedding_loss: nn.HingeEmbeddingLoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
    F.multilabel_margin_loss: nn.MultiLabelMarginLoss,
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
}


def class_of(function: Any) -> type[nn.Module] | None:
    """Return the loss class that does what this function of `torch.nn.functional` does.

    None if it is none of them.
    """
    return _CLASSES.get(function) if inspect.isroutine(function) else None


def class_names() -> list[str]:
    """Return the names of torch's loss classes that are called with (outputs, targets)."""
    return sorted(kind.__name__ for kind in _CLASSES.values())


def as_object(loss_fn: Any) -> Any:
    """Return an object of torch's loss class for one of torch's loss functions.

    A `functools.partial` of such a function is converted, too.

    Anything else is returned as it is.

    Raises:
        UsageError: the partial has arguments that the class does not take.
    """
    if not callable(loss_fn):
        return loss_fn
    made = loss_fn if isinstance(loss_fn, partial) else partial(loss_fn)
    loss_class = class_of(made.func)
    if loss_class is None:
        return loss_fn
    function = made.func.__name__
    try:
        if made.args:
            raise TypeError("its first arguments are the outputs and the targets")
        return loss_class(**made.keywords)
    except TypeError as error:
        fix = (
            f"name what nn.{loss_class.__name__} takes, as in functools.partial(F.{function},"
            " reduction='mean')"
        )
        what = f"functools.partial of {function} has arguments that do not belong to it"
        raise UsageError(what, where="loss_fn", why=str(error), fix=fix) from None
