"""Looks at the backward passes of a training loop, and at what is done with their gradients.

Tests: tests/verify/test_watch.py, tests/verify/test_sound.py
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.tensors import local
from lockstep.torch_compat.loss_functions import is_mean
from lockstep.verify.loop.findings import LoopLog
from lockstep.verify.own_lines import own_line


class PassChecks:
    """Looks at backward passes, clipping and accumulation, from one update to the next."""

    def __init__(self, log: LoopLog) -> None:
        self._log = log
        self.total = 0  # backward passes that this process has begun
        self._of_step = 0  # those since the last step
        self._batches = 0  # read from loaders since the last step
        self._undivided_losses = True  # of this step: each is a mean that nothing has divided
        # one, and its norm after the last backward pass
        self._gradient: tuple[Tensor, float] | None = None
        self._backward_at = ""  # where the last backward pass was begun
        # a parameter whose gradient was clipped since the last step
        self._clipped: Tensor | None = None
        self._clipped_at = ""
        self._scaler: Any = None  # whose scale the gradients have
        self.unsynchronised_at = ""  # where FSDP was told last to reduce no gradients; or empty

    def batch_read(self) -> None:
        """Note a batch that a loader gives."""
        self._batches += 1

    def begin(self, loss: Any) -> None:
        """Look at a backward pass that begins."""
        if self._clipped is not None and not has_gradient(self._clipped):
            # set to zero since: the loop has updated without an optimizer
            self._clipped = None
            self._of_step = 0
        if self._clipped is not None:
            text = (
                "a backward pass adds to the gradients after they are clipped, so that the step is"
                " longer than the norm allows"
            )
            fix = "clip once, when all gradients are there"
            self._log.find("clipping", text, fix, self._clipped_at)
        if self._log.looks:
            self._backward_at = own_line()
        self._of_step += 1
        self.total += 1
        self._undivided_losses &= isinstance(loss, Tensor) and is_mean(loss)
        if (
            self._log.looks
            and isinstance(loss, Tensor)
            and loss.numel() == 1
            and not bool(torch.isfinite(loss.detach()))
        ):
            text = f"the loss is {float(loss.detach())} in step {self._log.steps + 1}"
            self._log.find("not finite", text, line=self._backward_at)

    def end(self, optimizer: Optimizer | None) -> None:
        """Note a gradient of the optimizer at the end of a backward pass."""
        if self._log.looks and optimizer is not None:
            parameters = optimizer.param_groups[0]["params"]
            parameter = next((p for p in parameters if p.grad is not None), None)
            self._gradient = None
            if parameter is not None:
                self._gradient = (parameter, float(local(parameter.grad).detach().norm()))

    def synchronised(self, is_so: bool) -> None:
        """Note whether FSDP is told to reduce gradients from now on."""
        self.unsynchronised_at = "" if is_so else own_line()

    def scaled(self, scaler: Any) -> None:
        """Note the scaler of a loss, whose gradients will be as large."""
        self._scaler = scaler

    def unscaled(self) -> None:
        """Note that gradients have been divided by that scale."""
        self._scaler = None

    def clipped(self, parameters: Iterable[Tensor]) -> None:
        """Look at gradients that are clipped."""
        if self._log.looks and self._clipped is None:
            self._check_accumulation()
        self._clipped = next((p for p in reversed(list(parameters)) if p.grad is not None), None)
        if self._log.looks:
            self._clipped_at = own_line()
            self._check_scale()
        if self._log.looks and self._clipped is None:
            text = (
                "gradients are clipped where there are none: before the backward pass, or of a"
                " model that is not trained"
            )
            fix = "clip between loss.backward() and optimizer.step()"
            self._log.find("clipping", text, fix, self._clipped_at)

    def _check_scale(self) -> None:
        """Find gradients that are clipped while they have the scale of the loss."""
        scale = 1.0 if self._scaler is None else float(self._scaler.get_scale())
        if scale != 1.0:
            text = (
                f"gradients are clipped while a scaler has them {scale:g} × as large: the norm that"
                " they are clipped to is that of the scaled ones"
            )
            fix = "scaler.unscale_(optimizer) before they are clipped"
            self._log.find("clipping", text, fix, self._clipped_at)

    def begin_update(self) -> None:
        """Look at the gradients of the step, which an optimizer is about to use."""
        if self._clipped is None:  # else they were looked at before
            self._check_accumulation()

    def _check_accumulation(self) -> None:
        """Find a step that adds up the gradients of micro-batches, and divides by nothing.

        The gradient after the last backward pass is then still the one that is used.
        """
        # Losses of several networks, or terms that are differentiated one by one, belong to the
        # same batch.
        if not (
            1 < self._of_step <= self._batches
            and self._undivided_losses
            and self._log.steps
            and self._gradient
        ):
            return
        parameter, norm = self._gradient
        if (
            parameter.grad is not None
            and abs(float(local(parameter.grad).norm()) - norm) <= 1e-6 * norm
        ):
            text = (
                f"a step adds up the gradients of {self._of_step} micro-batches, and nothing"
                f" divides their mean losses: it is {self._of_step} × as long as that of one batch"
            )
            fix = f"(loss / {self._of_step}).backward()"
            self._log.find("gradient accumulation", text, fix, self._backward_at)

    def end_step(self) -> None:
        """Begin to count anew, once an optimizer has stepped."""
        self._of_step = 0
        self._batches = 0
        self._clipped = None
        self._undivided_losses = True
        self._scaler = None


def has_gradient(parameter: Tensor) -> bool:
    """Return whether a parameter has a gradient that is not zero everywhere."""
    return parameter.grad is not None and bool(local(parameter.grad).any())
