"""Looks at the updates of a training loop: what each optimizer uses, and what it changes.

Tests: tests/verify/test_watch.py, tests/verify/test_sound.py
"""

import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import listed
from lockstep.tensors import local
from lockstep.verify.loop.findings import LoopLog
from lockstep.verify.loop.made import MadeObjects
from lockstep.verify.loop.models import ModelChecks
from lockstep.verify.loop.passes import PassChecks, has_gradient
from lockstep.verify.own_lines import own_line

# Relative to the largest gradient: below it one is rounding, as that of a bias before a
# normalisation, and moves nothing.
_ROUNDING = 1e-6


class Nesting:
    """Tells an optimizer's step from those inside of it, as ZeroRedundancyOptimizer takes them."""

    def __init__(self) -> None:
        self._outermost: Optimizer | None = None

    def begins(self, optimizer: Optimizer) -> bool:
        """Note that an optimizer's step begins, and return whether it is the outermost one."""
        if self._outermost is None or self._outermost is optimizer:
            self._outermost = optimizer
            return True
        return False

    def ends(self, optimizer: Optimizer) -> bool:
        """Note that an optimizer's step has ended, and return whether it was the outermost one."""
        if self._outermost is not optimizer:
            return False
        self._outermost = None
        return True


@dataclass(frozen=True)
class _LastUpdate:
    """The facts that are known of an optimizer's last update."""

    passes: int = -1  # backward passes that this process had begun by then
    cleared: bool = True  # whether its gradients were seen cleared since


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters of an optimizer, group after group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


class UpdateChecks:
    """Looks at what optimizers use, and at what they change."""

    def __init__(
        self, log: LoopLog, made: MadeObjects, models: ModelChecks, passes: PassChecks
    ) -> None:
        self._log = log
        self._made = made
        self._models = models
        self._passes = passes
        self._optimizers: list[Any] = []  # weak references to those that have stepped
        self._last: dict[int, _LastUpdate] = {}  # by the id of the optimizer
        # of each optimizer: a parameter that had a gradient at its last update, and this gradient
        self._with_gradient: dict[int, tuple[Tensor, Tensor]] = {}
        self._before: dict[int, tuple[Tensor, bool]] = {}  # id → value, whether it had a gradient
        self._unmoved: Counter[str] = Counter()  # name → steps that left it, in spite of a gradient
        self._without_gradient: Counter[str] = Counter()  # name → steps in which it got none

    @property
    def first_optimizer(self) -> Optimizer | None:
        """The first optimizer that has stepped, if it is still there."""
        optimizer: Optimizer | None = self._optimizers[0]() if self._optimizers else None
        return optimizer

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that have stepped, and that are still there."""
        optimizers = [reference() for reference in self._optimizers]
        return [optimizer for optimizer in optimizers if optimizer is not None]

    @property
    def without_gradient(self) -> list[str]:
        """Names of the parameters that got no gradient in the first steps."""
        counts = self._without_gradient.items()
        return [name for name, steps in counts if steps >= self._log.first]

    def note_cleared(self) -> None:
        """Note which optimizers' gradients are cleared, as a backward pass begins."""
        for optimizer in self.optimizers:
            update = self._last.get(id(optimizer), _LastUpdate())
            if not update.cleared and self._has_cleared(optimizer):
                self._last[id(optimizer)] = replace(update, cleared=True)

    def _has_cleared(self, optimizer: Optimizer) -> bool:
        """Return whether the gradients of an optimizer's last update are gone."""
        parameter, _ = self._with_gradient.get(id(optimizer), (None, None))
        if parameter is None or parameter.grad is None:
            return True
        return self._log.looks and not has_gradient(parameter)

    def begin(self, optimizer: Optimizer) -> None:
        """Look at what an optimizer is about to use."""
        if not any(reference() is optimizer for reference in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))
        own = parameters_of(optimizer)
        self._check_new_gradients(optimizer, own)
        if not self._log.looks:
            return
        trained = [p for p in own if p.requires_grad]
        if trained and not any(p.grad is not None for p in trained):
            self._find_no_gradients(optimizer, trained)
        sizes = [_size_of_gradient(p) for p in own]
        least = _ROUNDING * max(sizes, default=0.0)
        self._before = {
            id(p): (local(p).detach().clone(), size > least)
            for p, size in zip(own, sizes, strict=True)
        }
        if not _are_finite(own):
            text = (
                f"a gradient of step {self._log.steps + 1} is not finite, and the optimizer uses it"
            )
            self._log.find("not finite", text, line=own_line())
        self._passes.begin_update()

    def _find_no_gradients(self, optimizer: Optimizer, trained: list[Tensor]) -> None:
        """Find why an optimizer gets no gradient: its parameters, or how they are reduced."""
        if not any(self._models.knows(p) for p in trained):
            text = (
                "the optimizer's parameters get no gradient: it was made for another model, or"
                " before the model was converted or wrapped"
            )
            fix = "make the optimizer from the model that is called"
            self._log.find("stale optimizer", text, fix, self._made.line_of(optimizer))
        elif self._passes.unsynchronised_at:
            text = (
                "FSDP gives the optimizer no gradient: set_requires_gradient_sync(False) holds in"
                " the last backward pass of the step, too, and nothing is reduced"
            )
            fix = "set_requires_gradient_sync(True) before the last micro-batch of a step"
            self._log.find("gradient synchronisation", text, fix, self._passes.unsynchronised_at)
        else:
            text = (
                "no parameter of the optimizer gets a gradient, though the model that is called has"
                " them: the loss is cut off from it"
            )
            fix = "let no detach(), no_grad() or .data cut them off from the loss"
            self._log.find("parameters without gradients", text, fix, own_line())

    def _check_new_gradients(self, optimizer: Optimizer, own: list[Tensor]) -> None:
        """Find an update with the gradients of the one before it, or with a sum of both."""
        last = self._last.get(id(optimizer), _LastUpdate())
        with_gradient = [p for p in own if p.grad is not None]
        step = self._log.steps + 1
        if last.passes == self._passes.total and with_gradient:
            if self._are_by_hand(optimizer):
                return
            text = (
                f"step {step} uses the gradients of the step before: no backward pass"
                " came between them"
            )
            fix = "call optimizer.step() once for each step's backward passes"
            self._log.find("update without a gradient", text, fix, own_line())
        elif not last.cleared and self._log.looks:
            names = [self._models.name_of(p) for p in with_gradient]
            text = f"step {step} adds to the gradients of the step before in {listed(names, 5)}"
            fix = "optimizer.zero_grad() after each optimizer.step()"
            self._log.find("gradients not zeroed", text, fix, own_line())

    def _are_by_hand(self, optimizer: Optimizer) -> bool:
        """Return whether a script has given parameters other gradients than at the last update."""
        parameter, gradient = self._with_gradient.get(id(optimizer), (None, None))
        is_other = parameter is not None and parameter.grad is not gradient
        return is_other or not self._passes.total

    def check_moved(self, optimizer: Optimizer, own: list[Tensor]) -> None:
        """Note parameters that an update with a gradient left unchanged, or that have none.

        Find frozen ones that it has changed. What a script changes otherwise, as the weights of a
        momentum encoder, it changes on purpose.
        """
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        frozen = []
        for p in own:
            before, had_gradient = self._before.get(id(p), (None, False))
            name = self._models.name_of(p)
            if before is None or not before.numel() or before.shape != local(p).shape:
                continue
            is_moved = not torch.equal(before, local(p).detach())
            if is_moved and self._models.is_frozen(p):
                frozen.append(name)
            if had_gradient and max(rates, default=1.0) > 0 and not is_moved:
                self._unmoved[name] += 1
            elif p.requires_grad and p.grad is None:
                self._without_gradient[name] += 1
        self._before = {}
        if frozen:
            text = f"{listed(frozen, 5)} do not require gradients, and an update has changed them"
            fix = "give the optimizer no parameter that is frozen, or set its .grad to None"
            self._log.find("frozen parameters", text, fix, own_line())

    def end(self, optimizer: Optimizer, own: list[Tensor]) -> None:
        """Note an optimizer's update, which has used the gradients of its parameters."""
        self._last[id(optimizer)] = _LastUpdate(self._passes.total, cleared=False)
        with_gradient = next((p for p in own if p.grad is not None), None)
        if with_gradient is not None and with_gradient.grad is not None:
            self._with_gradient[id(optimizer)] = (with_gradient, with_gradient.grad)

    def check_unmoved(self) -> None:
        """Find parameters with gradients that no update has changed."""
        names = [name for name, steps in self._unmoved.items() if steps >= self._log.first]
        if names:
            text = f"{listed(names, 5)} have gradients, and no update changes them"
            self._log.find("parameters that do not move", text)


def _size_of_gradient(parameter: Tensor) -> float:
    """Return the norm of a gradient; 0 without one."""
    gradient = parameter.grad
    if gradient is None:
        return 0.0
    values = local(gradient).detach()
    return float((values.coalesce().values() if values.is_sparse else values).float().norm())


def _are_finite(parameters: list[Tensor]) -> bool:
    """Return whether all gradients are numbers; sparse ones are not read."""
    norms = [
        local(p.grad).detach().norm().float().cpu()
        for p in parameters
        if p.grad is not None and not p.grad.is_sparse
    ]
    return not norms or bool(torch.isfinite(torch.stack(norms)).all())
