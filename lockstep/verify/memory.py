"""Finds what a model remembers from one micro-batch to the next, besides its parameters.

That is attributes of its modules, buffers, and globals, class attributes and closures of the user's
code that the modules run. A rank runs its own micro-batches only, so it remembers something else
than one process does.
"""

import copy
import pickle
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.torch_compat.module_hooks import forward_hooks, forward_pre_hooks

_LIBRARIES = re.compile(r"/(site-packages|dist-packages)/|/lib/python\d")
_LARGEST = 1 << 26  # bytes of a value that is still looked at


@dataclass(frozen=True)
class _Slot:
    """Something that keeps its value from one call to the next."""

    name: str  # for people
    holder: Any  # an object, or a dict
    key: str  # of the attribute, or in the dict

    def read(self) -> Any:
        if isinstance(self.holder, dict):
            return self.holder.get(self.key)
        return getattr(self.holder, self.key, None)

    def write(self, value: Any) -> None:
        if isinstance(self.holder, dict):
            self.holder[self.key] = value
        else:
            setattr(self.holder, self.key, value)


class ModelMemory:
    """The slots of a model's modules on this rank, as they are when this is made."""

    def __init__(self, parts: list[nn.Module]) -> None:
        by_name: dict[str, _Slot] = {}
        for part in parts:
            for slot in _slots(part):
                by_name.setdefault(slot.name, slot)
        self._slots = [slot for slot in by_name.values() if _print(slot.read()) is not None]
        self._first: list[Any] | None = None
        self._before: list[Any] = []

    def restore_first(self) -> None:
        """Put back what was there when this was called first."""
        if self._first is None:
            self._first = [_copy(slot.read()) for slot in self._slots]
            return
        for slot, value in zip(self._slots, self._first, strict=True):
            now = slot.read()
            if _print(now) != _print(value):
                _restore(slot, now, value)

    def begin(self) -> None:
        """Remember what is there before a forward pass."""
        self._before = [_print(slot.read()) for slot in self._slots]

    def moved(self) -> list[str]:
        """Return the names of the slots whose contents have changed since `begin`."""
        pairs = zip(self._slots, self._before, strict=False)
        return [slot.name for slot, before in pairs if _print(slot.read()) != before]


def _slots(part: nn.Module) -> Iterator[_Slot]:
    """Yield all that the modules of a part, and the code that they run, can remember."""
    functions: dict[int, FunctionType] = {}
    for path, module in part.named_modules():
        yield from _slots_of_module(path, module)
        for function in _functions_of(module):
            functions.setdefault(id(function), function)
    for function in functions.values():
        yield from _slots_of_function(function)


def _slots_of_module(path: str, module: nn.Module) -> Iterator[_Slot]:
    """Yield a module's own attributes and buffers, and the attributes of the user's classes."""
    of_every_module = vars(nn.Module())
    for name in vars(module):
        if name not in of_every_module and name != "training":
            yield _Slot(f"{path}.{name}" if path else name, vars(module), name)
    for name, _ in module.named_buffers(recurse=False):
        yield _Slot(f"the buffer {path}.{name}" if path else f"the buffer {name}", module, name)
    for cls in type(module).__mro__:
        if not _is_user_code(cls.__module__):
            continue
        for name, value in list(vars(cls).items()):
            if not callable(value) and not name.startswith("__"):
                yield _Slot(f"{cls.__name__}.{name}", cls, name)


def _slots_of_function(function: FunctionType) -> Iterator[_Slot]:
    """Yield the globals that a function names, what its closure holds, and its attributes."""
    code = function.__code__
    for name in code.co_names:
        if name not in function.__globals__:
            continue
        if not isinstance(function.__globals__[name], ModuleType | type):
            yield _Slot(f"{function.__module__}.{name}", function.__globals__, name)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if _is_filled(cell):
            yield _Slot(f"{name} of {function.__qualname__}", cell, "cell_contents")
    for name in vars(function):
        yield _Slot(f"{function.__qualname__}.{name}", vars(function), name)


def _functions_of(module: nn.Module) -> Iterator[FunctionType]:
    """Yield the user's functions that run with a module.

    These are methods, hooks, functions that were put in their place, and functions that they call.
    """
    queue: list[Any] = [*forward_pre_hooks(module), *forward_hooks(module), *vars(module).values()]
    for cls in type(module).__mro__:
        if _is_user_code(cls.__module__):
            queue += vars(cls).values()
    seen: set[int] = set()
    while queue:
        value = queue.pop()
        value = value.__func__ if isinstance(value, MethodType) else value
        if (
            isinstance(value, FunctionType)
            and _is_user_code(value.__module__)
            and id(value) not in seen
        ):
            seen.add(id(value))
            yield value
            # One function calls another, by its name or from its closure.
            queue += [
                value.__globals__[name]
                for name in value.__code__.co_names
                if name in value.__globals__
            ]
            queue += [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _is_user_code(module: str | None) -> bool:
    if module is None or module.partition(".")[0] in ("lockstep", "builtins"):
        return False
    return not _LIBRARIES.search(getattr(sys.modules.get(module), "__file__", None) or "")


def _print(value: Any) -> bytes | None:
    """Return bytes that are other ones when the value is; None for what is not looked at."""
    if isinstance(value, nn.Module | nn.Parameter | type | FunctionType | MethodType | ModuleType):
        return None
    try:
        if isinstance(value, torch.Generator):
            return bytes(value.get_state().cpu().numpy().tobytes())
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state).encode()
        if isinstance(value, Tensor):
            if value.numel() * value.element_size() > _LARGEST or value.is_meta:
                return None
            return bytes(
                value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
        pickled = pickle.dumps(value)
    except Exception:
        return None
    return pickled if len(pickled) <= _LARGEST else None


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.clone_state()
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _restore(slot: _Slot, now: Any, value: Any) -> None:
    """Put a value back; into the object that is there, where others hold it too."""
    if isinstance(now, torch.Generator) and isinstance(value, torch.Generator):
        now.set_state(value.get_state())
    elif isinstance(now, random.Random):
        now.setstate(value.getstate())
    elif isinstance(now, np.random.Generator):
        now.bit_generator.state = value.bit_generator.state
    elif isinstance(now, np.random.RandomState):
        now.set_state(value.get_state())
    elif isinstance(now, list):
        now[:] = copy.deepcopy(value)
    elif isinstance(now, dict | set):
        now.clear()
        now.update(copy.deepcopy(value))
    elif (
        isinstance(now, Tensor)
        and isinstance(value, Tensor)
        and now.shape == value.shape
        and not now.requires_grad
    ):
        now.copy_(value)
    else:
        slot.write(_copy(value))
