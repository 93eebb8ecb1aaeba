"""Handles the training and evaluation modes of models and of optimizers that have modes.

A model may arrive in the wrong mode, or be left in it by an evaluation of the caller's own. Looking
at each step costs 40 ns a module.

A schedule-free optimizer keeps two sets of weights, and has `train()` and `eval()`, which put one
or the other in place (Defazio et al. 2024, arXiv:2405.15682). Its evaluation weights are those to
evaluate, to save and to hand out.
"""

from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import UsageError, warn_at_caller
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.process_group.collectives import is_main_process


class Modes:
    """Puts an optimizer that has modes into the one that is needed.

    Every rank makes the same calls.
    """

    def __init__(self, placed: ParallelModel, optimizer: Optimizer) -> None:
        self._model = ModelModes(placed)
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

    def before_step(self, step: int) -> None:
        """Look at the model's modes, and put the weights in place that are trained."""
        self._model.before_step(step)
        if self._optimizer is not None:
            self._optimizer.train()

    def eval(self) -> None:
        """Put the weights in place that are evaluated and saved."""
        if self._optimizer is not None:
            self._optimizer.eval()


class ModelModes:
    """Looks at the modes in which a model is trained, before each step."""

    def __init__(self, placed: ParallelModel) -> None:
        self._root = placed.root
        self._modules = [] if placed.root is None else list(placed.root.modules())
        self._modes: list[bool] | None = None  # of the modules, in the step before
        self._warned = False
        self._parameters = list(placed.parameters.values())
        self._trained = next((p for p in self._parameters if p.requires_grad), None)

    def before_step(self, step: int) -> None:
        """Refuse a step without gradients; warn once of a model that is in evaluation mode.

        Args:
            step: the number of the step that begins, from 1.
        """
        if not torch.is_grad_enabled():
            raise _without_gradients(step)
        if self._trained is not None and not self._trained.requires_grad:
            self._trained = next((p for p in self._parameters if p.requires_grad), None)
            if self._trained is None:
                raise _all_frozen(step)
        modes = list(map(_training, self._modules))
        if modes != self._modes:
            is_first = self._modes is None
            self._modes = modes
            self._look(None if is_first else step)

    def _look(self, since: int | None) -> None:
        in_evaluation = (
            None if self._root is None or self._warned else _left_in_evaluation(self._root)
        )
        if in_evaluation is None:
            return
        self._warned = True
        if is_main_process():
            _warn_of_evaluation_mode(in_evaluation, since)


_training = attrgetter("training")


def _without_gradients(step: int) -> UsageError:
    """Return the error of a loop that runs where torch records no graph."""
    how = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
    why = (
        f"torch.{how}() is around the training loop, or was left on by an evaluation, as"
        " torch.set_grad_enabled(False) is"
    )
    return UsageError(
        f"gradients are switched off in step {step}",
        why=why,
        fix=f"write `with torch.{how}():` around the evaluation alone, and leave it before the"
        " next step",
    )


def _all_frozen(step: int) -> UsageError:
    return UsageError(
        f"no parameter requires gradients any more in step {step}",
        why="requires_grad_(False) was called on the model after training began",
        fix="call model.requires_grad_(True) before the next step",
    )


def _warn_of_evaluation_mode(name: str, since: int | None) -> None:
    """Warn of a model, or a part of it, that trains in evaluation mode.

    Args:
        name: of the part, "" for the whole model.
        since: the step before which it was switched; None if it arrived so.
    """
    who = f"its part {name}" if name else "the model"
    line = f"model.{name}.train()" if name else "model.train()"
    without = "without dropout, and batch normalisation by its running statistics"
    if since is None:
        text = (
            f"{who} is in evaluation mode, as from_pretrained returns it: it trains {without}\n"
            f"  do: {line} before training"
        )
    else:
        text = (
            f"{who} is in evaluation mode since before step {since}: it trains {without}\n"
            f"  do: {line} after the evaluation that called eval()"
        )
    warn_at_caller(text)


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
