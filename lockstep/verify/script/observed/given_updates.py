"""Lets a script's optimizer update with the gradients and settings that its task names.

Settings are put back after each update, so that the script goes on from its own.

Tests: tests/verify/test_script.py
"""

from typing import Any

import torch
from torch import Tensor

from lockstep.verify.script.observed import values
from lockstep.verify.script.task import GivenValues


class GivenUpdates:
    """Puts what is given in place of the script's own, in each update of one rank."""

    def __init__(self, given: GivenValues, rank: int) -> None:
        self._given = given
        self._rank = rank
        # of the updates that have begun: one optimizer may step within the step of another
        self._own_settings: list[list[dict[str, Any]]] = []

    def begin(
        self,
        step: int,
        optimizer: torch.optim.Optimizer,
        names: list[str],
        parameters: list[Tensor],
    ) -> None:
        """Give an update its gradients and settings; `names` are those of the parameters."""
        if step < len(self._given.gradients):
            self._give_gradients(step, names, parameters)
        own = self._give_settings(step, optimizer) if step < len(self._given.settings) else []
        self._own_settings.append(own)

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """Put the script's own settings back."""
        own_settings = self._own_settings.pop() if self._own_settings else []
        for group, settings in zip(optimizer.param_groups, own_settings, strict=False):
            group.update(settings)

    def _give_gradients(self, step: int, names: list[str], parameters: list[Tensor]) -> None:
        of_step = self._given.gradients[step]
        for name, parameter in zip(names, parameters, strict=True):
            given = self._given.for_rank(of_step.get(name, ()), self._rank)
            if given and parameter.grad is not None and not parameter.grad.is_sparse:
                values.give(parameter.grad, given)

    def _give_settings(self, step: int, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Give the parameter groups the settings of a step; return the script's own."""
        own = []
        for group, given in zip(optimizer.param_groups, self._given.settings[step], strict=False):
            own.append({key: group[key] for key in given if key in group})
            group.update({key: value for key, value in given.items() if key in group})
        return own
