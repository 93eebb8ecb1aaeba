"""What placement has changed on the modules of a model: methods that were replaced, and hooks.

Axes and other steps of placement let a module compute something else in two ways: by a hook, or by
a method of the instance in place of its class's (most often `forward`). Such a method carries the
names of those that put it there, so that what was changed can be listed:

    for change in placed.changes():
        print(change)    # layers.0.attention.query.product: tensor, context

Tests: tests/parallel/test_changes.py
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from lockstep.torch_compat.module_hooks import forward_hooks, forward_pre_hooks

_BY = "replaced_by"  # attribute of a function that is a module's method by ours
_OURS = "lockstep."


@dataclass(frozen=True)
class ModuleChange:
    """One change of one module."""

    module: str  # its name in the model; empty: the model itself
    what: str  # `forward` or another method; `hook`
    by: tuple[str, ...]  # who replaced it, one after the other; of a hook, the file that put it

    def __str__(self) -> str:
        return f"{self.module or 'the model'}.{self.what}: {', '.join(self.by)}"


def replace_method(
    module: nn.Module, call: Callable[..., Any], *, by: str, method: str = "forward"
) -> None:
    """Give a module its own method, in place of its class's or of an earlier replacement.

    Args:
        module: the module.
        call: takes the arguments without `self`. A `MethodType` leaves a deep copy of the module
            with a method of its own.
        by: the axis or step of placement that does so.
        method: which one.
    """
    function: Any = getattr(call, "__func__", call)
    setattr(function, _BY, (*_replaced_by(vars(module).get(method)), by))
    setattr(module, method, call)


def _replaced_by(call: Any) -> tuple[str, ...]:
    names: tuple[str, ...] = getattr(getattr(call, "__func__", call), _BY, ())
    return names


def changes_of(parts: Sequence[nn.Module]) -> list[ModuleChange]:
    """Return the changes on modules: each replaced method, and each hook around a forward pass."""
    changes: dict[ModuleChange, None] = {}
    for part in parts:
        for name, module in part.named_modules():
            changes |= dict.fromkeys(_of_module(name, module))
    return list(changes)


def _of_module(name: str, module: nn.Module) -> Iterator[ModuleChange]:
    for method, value in vars(module).items():
        by = _replaced_by(value)
        if by:
            yield ModuleChange(name, method, by)
    for hook in (*forward_pre_hooks(module), *forward_hooks(module)):
        function = getattr(hook, "func", hook)  # of functools.partial
        file = str(getattr(function, "__module__", ""))
        if file.startswith(_OURS):
            yield ModuleChange(name, "hook", (file.removeprefix(_OURS),))
