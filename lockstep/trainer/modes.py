"""Handles the training and evaluation modes of models and of optimizers that have modes.

A model may arrive in the wrong mode.

A schedule-free optimizer keeps two sets of weights, and has `train()` and `eval()`, which put one
or the other in place (Defazio et al. 2024, arXiv:2405.15682). Its evaluation weights are those to
evaluate, to save and to hand out.
"""

import warnings
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lockstep.collectives import is_main_process
from lockstep.errors import UsageError
from lockstep.parallel.parallel_model import ParallelModel


class Modes:
    """Puts an optimizer that has modes into the one that is needed.

    Every rank makes the same calls.
    """

    def __init__(self, placed: ParallelModel, optimizer: Optimizer) -> None:
        self._placed = placed
        self._has_begun = False
        has_modes = all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
        self._optimizer: Any = optimizer if has_modes else None
        if has_modes and placed.local_training is not None:
            what = (
                f"{type(optimizer).__name__} has modes, and diloco exchanges the weights of one of"
                " them"
            )
            raise UsageError(
                what,
                where="distributed.strategy: diloco",
                fix="use ddp or fsdp, or another optimizer",
            )

    def before_step(self) -> None:
        """Look at the model's mode before the first step.

        Put the weights in place that are trained.
        """
        if not self._has_begun:
            self._has_begun = True
            warn_of_evaluation_mode(self._placed)
        if self._optimizer is not None:
            self._optimizer.train()

    def eval(self) -> None:
        """Put the weights in place that are evaluated and saved."""
        if self._optimizer is not None:
            self._optimizer.eval()


def warn_of_evaluation_mode(placed: ParallelModel) -> None:
    """Warn of a model that is in evaluation mode when its training begins; frozen parts may be."""
    found = None if placed.root is None else _left_in_evaluation(placed.root)
    if found is None or not is_main_process():
        return
    name, lines = (
        (f"its part {found}", f"model.{found}.train()") if found else ("the model", "model.train()")
    )
    warnings.warn(
        f"{name} is in evaluation mode, as from_pretrained returns it: it trains without dropout,"
        f" and batch normalisation by its running statistics\n  do: {lines} before training",
        stacklevel=4,
    )


_DROPOUT = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def _left_in_evaluation(root: nn.Module) -> str | None:
    """Return the name of the outermost module that trains in evaluation mode, "" for the root.

    None if there is none.

    A part counts if dropout in it would be active, and nothing in it is in training mode.
    """
    if not root.training:
        return ""
    inside: set[int] = set()
    for name, module in root.named_modules():
        if module.training or id(module) in inside:
            continue
        inside |= {id(each) for each in module.modules()}
        drops = any(isinstance(each, _DROPOUT) and each.p > 0 for each in module.modules())
        trains = any(parameter.requires_grad for parameter in module.parameters())
        if drops and trains and not any(each.training for each in module.modules()):
            return str(name)
    return None
