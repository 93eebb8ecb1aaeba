"""A module that is called beside its wrapper is found where its gradients are used unreduced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.verify.loop.findings import LoopFinding, LoopLog
from lockstep.verify.loop.made import MadeObjects
from lockstep.verify.loop.wrappers import WrapperChecks


class Wrapper(DistributedDataParallel):
    """One that needs no ranks, and reduces nothing."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


class Loop:
    """A critic in a wrapper, and what looks at its passes."""

    def __init__(self) -> None:
        self.inner = nn.Linear(2, 1)
        self.wrapper = Wrapper(self.inner)
        made = MadeObjects()
        made.note(self.wrapper)
        self.found: list[LoopFinding] = []
        self.checks = WrapperChecks(LoopLog(3, 100, self.found.append), made)

    def take(self, *called: nn.Module, updates: bool = True) -> None:
        """Call modules, go backward, and update."""
        for module in called:
            self.checks.model_called(module)
        self.checks.backward()
        self.inner.weight.grad = torch.ones(1, 2)
        if updates:
            self.checks.begin_update([*self.inner.parameters()])
            self.inner.weight.grad = None


def penalty(loop: Loop) -> None:
    loop.take(loop.wrapper, loop.inner)


def beside(loop: Loop) -> None:
    loop.take(loop.wrapper)
    loop.take(loop.inner)


def in_another_pass(loop: Loop) -> None:
    loop.take(loop.inner, updates=False)
    loop.inner.weight.grad = None
    loop.take(loop.wrapper)


def left_behind(loop: Loop) -> None:
    loop.take(loop.inner, updates=False)
    loop.take(loop.wrapper)


@pytest.mark.parametrize(
    ("run", "is_found"),
    [(penalty, False), (beside, True), (in_another_pass, False), (left_behind, True)],
)
def test_calls_beside_a_wrapper(run: Callable[[Any], None], is_found: bool) -> None:
    loop = Loop()
    run(loop)
    assert [finding.kind for finding in loop.found] == ["gradient synchronisation"] * is_found
