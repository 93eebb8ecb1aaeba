"""Looks at modules that are called beside the DistributedDataParallel that wraps them.

A wrapper reduces the gradients of the passes in which it is called itself, whoever else calls what
it wraps: a penalty of the module's own is reduced with the loss. Gradients of another pass are not,
and are a mistake where an optimizer uses them. A generator's pass through its critic leaves some
behind that are cleared before the critic's own.

Tests: tests/verify/test_wrappers.py
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.verify.loop.findings import LoopLog
from lockstep.verify.loop.made import MadeObjects
from lockstep.verify.loop.passes import has_gradient
from lockstep.verify.own_lines import own_line


@dataclass(frozen=True)
class _CallBeside:
    """A call of a module beside its wrapper."""

    wrapper: Any
    name: str  # of the module's class
    line: str


class WrapperChecks:
    """Looks at the calls between two backward passes: of wrappers, and beside them."""

    def __init__(self, log: LoopLog, made: MadeObjects) -> None:
        self._log = log
        self._made = made
        self._called: set[int] = set()  # ids of wrappers, since the last backward pass
        self._beside: dict[int, _CallBeside] = {}  # id of a wrapper → the same
        # id of a wrapper → what was called in a pass whose gradients are not reduced
        self._unreduced: dict[int, _CallBeside] = {}

    def model_called(self, model: nn.Module) -> None:
        """Note a model that is called from outside, with gradients."""
        if isinstance(model, DistributedDataParallel):
            self._called.add(id(model))
            return
        for wrapper in self._made.of_kind(DistributedDataParallel):
            if any(module is model for module in wrapper.modules()):
                call = _CallBeside(wrapper, type(model).__name__, own_line())
                self._beside.setdefault(id(wrapper), call)

    def backward(self) -> None:
        """Note a backward pass that begins."""
        self._unreduced = {
            wrapper: call
            for wrapper, call in self._unreduced.items()
            if any(map(has_gradient, call.wrapper.parameters()))  # they are not cleared
        }
        self._unreduced |= {
            wrapper: call for wrapper, call in self._beside.items() if wrapper not in self._called
        }
        self._called = set()
        self._beside = {}

    def begin_update(self, own: list[Tensor]) -> None:
        """Find gradients that no wrapper has reduced, among those that an optimizer uses."""
        updated = {id(parameter) for parameter in own if has_gradient(parameter)}
        for call in self._unreduced.values():
            if not updated.isdisjoint(map(id, call.wrapper.parameters())):
                text = (
                    f"{call.name} is called beside the DistributedDataParallel that wraps it: its"
                    " gradients are not reduced"
                )
                fix = "call the wrapper, and not what it wraps"
                self._log.find("gradient synchronisation", text, fix, call.line)
