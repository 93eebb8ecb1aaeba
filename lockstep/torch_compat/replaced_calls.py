"""Puts functions in the place of those that a script calls, and takes them away again.

A function is replaced where it is looked up by everybody (`torch.nn.utils.clip_grad_norm_`). Other
modules may hold it by a name of their own: those that were imported before, the module that defines
it, and a notebook's cells. `patch_names`, called last, replaces it there, too.

Code that torch scripts, as its functional optimizers, finds operators by the functions that stand
for them: those that are put in their place stand for them, too.

Public torch: none; functions of any module are replaced, and methods of any class, those of torch's
modules among them. Seen to work: torch 2.13.0. When gone: importing this file raises ImportError,
or `getattr` AttributeError with the name that is replaced.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import ModuleType
from typing import Any

from torch.jit import _builtins

Around = Callable[[Callable[[], Any], Any], Any]
"""Is given a call to make and its first argument; returns the call's result."""

Undo = Callable[[], None]
"""Puts back what a patch has replaced."""

_replaced: dict[int, tuple[Any, Any]] = {}
"""By the id of a function of a module: the function, and what stands in its place."""


def put_in_place(owner: Any, name: str, value: Any) -> Undo:
    """Put a value in the place of a function of a module, or of a class."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    if isinstance(owner, ModuleType):
        _replaced[id(original)] = (original, value)
        _script_as(original, value)

    def undo() -> None:
        setattr(owner, name, original)
        _replaced.pop(id(original), None)

    return undo


_scripted: list[Any] = []
"""What stands for an operator is known by its id, which nothing else may get."""


def _script_as(original: Any, value: Any) -> None:
    """Let a value stand for the operator of torch for which a function stands, if it does."""
    operator = _builtins._find_builtin(original)  # type: ignore[no-untyped-call]
    if operator is not None:
        _builtins._register_builtin(value, operator)
        _scripted.append(value)


def wrap_call(module: Any, name: str, around: Around) -> Undo:
    """Let `around` make each call of a function, which it is given with its first argument."""
    original = getattr(module, name)
    parameter = next(iter(inspect.signature(original).parameters))

    @wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs.pop(parameter)
        if isinstance(first, Iterator):
            first = list(first)  # it is read twice
        return around(lambda: original(first, *args[1:], **kwargs), first)

    return put_in_place(module, name, observed)


def report_after(kind: type, name: str, report: Callable[[Any, Any], None]) -> Undo:
    """Report each call of a method when it is done, by its object and its result."""
    original = getattr(kind, name)

    @wraps(original)
    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        report(self, result)
        return result

    return put_in_place(kind, name, observed)


class NestedCalls:
    """Tells a call that a script makes from one that is made within it."""

    def __init__(self) -> None:
        self._depth = 0

    def is_within(self) -> bool:
        """Return whether a call runs."""
        return self._depth > 0

    def entered(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Return the call, within which others are."""

        def inner() -> Any:
            self._depth += 1
            try:
                return call()
            finally:
                self._depth -= 1

        return inner


def outermost(around: Around) -> Around:
    """Return what leaves calls within another call alone."""
    nesting = NestedCalls()

    def observed(call: Callable[[], Any], first: Any) -> Any:
        return call() if nesting.is_within() else around(nesting.entered(call), first)

    return observed


def undo_all(several: list[Undo]) -> Undo:
    """Return what undoes several patches."""

    def undo() -> None:
        for one in several:
            one()

    return undo


def patch_names() -> Undo:
    """Replace the functions that are replaced by now under all names that modules have for them."""
    undo = []
    for module in list(sys.modules.values()):
        # Objects that stand for modules may run anything when they are asked.
        name_of_module = getattr(module, "__name__", "")
        if not isinstance(module, ModuleType) or name_of_module.startswith("lockstep."):
            continue
        for name, value in list(vars(module).items()):
            original, replacement = _replaced.get(id(value), (None, None))
            if original is not None and original is value:
                undo.append(_rename(module, name, original, replacement))
    return undo_all(undo)


def _rename(module: ModuleType, name: str, original: Any, replacement: Any) -> Undo:
    setattr(module, name, replacement)
    return lambda: setattr(module, name, original)
