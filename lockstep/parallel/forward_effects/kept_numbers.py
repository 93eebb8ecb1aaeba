"""Numbers that a forward pass leaves in modules' attributes, and whether the next one uses them.

A running scale kept as a float is state: the next pass reads it before it writes it. A loss that is
kept for others to look at is none: it is written alone. Nothing but reading tells the two apart, so
for one forward pass the objects that hold changed numbers record how they are used: modules and
plain objects by a class of their own, dicts and lists by copies that take their place.

Tests: tests/parallel/forward_effects/test_combined_buffers.py
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

from torch import nn

from lockstep.attributes import attributes_of
from lockstep.parallel.forward_effects.attribute_changes import OF_TORCH

_DEPTH = 3  # containers in containers


@dataclass(frozen=True)
class KeptNumber:
    """A number or a NumPy array, and what holds it."""

    value: Any  # of an array its bytes
    holder: Any  # a module, an object, a dict, a list, or another container
    key: Any  # name of the attribute, key or index
    owner: nn.Module  # the module that it belongs to
    attribute: str  # of the owner, where the holder is, or the number itself

    def equals(self, other: "KeptNumber | None") -> bool:
        """Return whether another one has the same value; a nan that stayed has."""
        return other is not None and (self.value is other.value or bool(self.value == other.value))


def kept_numbers(root: nn.Module) -> dict[str, KeptNumber]:
    """Return name → number, for numbers in attributes of modules and in containers there."""
    numbers = {}
    for path, module in root.named_modules():
        for attribute, value in list(vars(module).items()):
            if attribute not in OF_TORCH:
                name = f"{path}.{attribute}" if path else attribute
                for full, number, holder, key in _inside(name, value, module, attribute, _DEPTH):
                    numbers[full] = KeptNumber(number, holder, key, module, attribute)
    return numbers


def _inside(
    name: str, value: Any, holder: Any, key: Any, depth: int
) -> Iterator[tuple[str, Any, Any, Any]]:
    numpy = sys.modules.get("numpy")
    if isinstance(value, Number) and not isinstance(value, bool):
        yield name, value, holder, key
    elif numpy is not None and isinstance(value, numpy.ndarray):
        yield name, value.tobytes(), holder, key
    elif depth:
        for full, inner, its_key in members(name, value):
            yield from _inside(full, inner, value, its_key, depth - 1)


def members(name: str, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (full name, member, its key) of a container or a plain object.

    A plain object is not a module and can't be called.
    """
    if isinstance(value, dict):
        yield from ((f"{name}[{key!r}]", inner, key) for key, inner in list(value.items()))
    elif isinstance(value, list | tuple) or type(value).__name__ == "deque":
        yield from (
            (f"{name}[{position}]", inner, position) for position, inner in enumerate(value)
        )
    elif not isinstance(value, nn.Module | type) and not callable(value):
        own = attributes_of(value) or {}
        yield from ((f"{name}.{key}", inner, key) for key, inner in list(own.items()))


@dataclass
class RecordedReads:
    """Records in one forward pass which of some numbers are read before they are written.

    `unknown`: those of holders that can't record it.
    """

    numbers: dict[str, KeptNumber]
    read: set[str] = field(default_factory=set)
    unknown: set[str] = field(default_factory=set)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def start(self) -> None:
        """Let the holders record."""
        by_holder: dict[int, dict[Any, str]] = {}
        for name, number in self.numbers.items():
            by_holder.setdefault(id(number.holder), {})[number.key] = name
        for names in by_holder.values():
            if not self._record(self.numbers[next(iter(names.values()))], names):
                self.unknown |= set(names.values())

    def stop(self) -> None:
        """Let the holders be as they were, with what has been written to them."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _record(self, number: KeptNumber, names: dict[Any, str]) -> bool:
        """Record reads of a number by another class of its holder, or a copy; return if it can."""
        holder = number.holder
        if type(holder) in (dict, list):
            if vars(number.owner).get(number.attribute) is not holder:
                return False
            self._replace(number, names)
            return True
        with suppress(TypeError):
            cls = type(holder)
            holder.__class__ = _recording_class(cls, names, self.read)
            self._undo.append(lambda: setattr(holder, "__class__", cls))
            return True
        return False

    def _replace(self, number: KeptNumber, names: dict[Any, str]) -> None:
        """Put a dict or list that records its reads in the place of the owner's."""
        holder = number.holder
        owner = number.owner
        attribute = number.attribute
        copy = (_RecordingDict if isinstance(holder, dict) else _RecordingList)(holder)
        copy.names = names
        copy.read = self.read
        vars(owner)[attribute] = copy

        def undo() -> None:
            if isinstance(holder, dict):
                holder.clear()
                holder.update(copy)
            else:
                holder[:] = copy
            if vars(owner).get(attribute) is copy:
                vars(owner)[attribute] = holder

        self._undo.append(undo)


def _recording_class(cls: Any, names: dict[Any, str], read: set[str]) -> type:
    """Return a class whose objects record which of `names` are read before they are written."""
    left = dict(names)

    def getattribute(self: Any, name: str) -> Any:
        if name in left:
            read.add(left[name])
        return cls.__getattribute__(self, name)

    def setattribute(self: Any, name: str, value: Any) -> None:
        left.pop(name, None)
        cls.__setattr__(self, name, value)

    own = {
        "__getattribute__": getattribute,
        "__setattr__": setattribute,
        "__module__": cls.__module__,
    }
    return type(cls.__name__, (cls,), own)


def grown(before: Iterable[str], now: Iterable[str]) -> set[str]:
    """Return the names of the sequences that have more members now than before."""
    return {sequence_of(name) for name in set(now).difference(before)} - {""}


def sequence_of(name: str) -> str:
    """Return the name of the list or other sequence of which `name` is a member, or ""."""
    sequence, _, index = name.rpartition("[")
    return sequence if index[:-1].isdecimal() else ""


class _Recording:
    """The record of members of dicts and lists that are read before they are written.

    Members are read one by one, or all at once.
    """

    names: dict[Any, str]
    read: set[str]
    _written: frozenset[Any] = frozenset()

    def saw(self, key: Any) -> None:
        if key in self.names and key not in self._written:
            self.read.add(self.names[key])

    def emptied(self) -> None:
        """Forget the members: what comes in their places is new."""
        self.names = {}

    def wrote(self, key: Any) -> None:
        self._written = self._written | {key}


class _RecordingDict(dict[Any, Any], _Recording):
    def __getitem__(self, key: Any) -> Any:
        self.saw(key)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.wrote(key)
        super().__setitem__(key, value)

    def get(self, key: Any, default: Any = None) -> Any:
        self.saw(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self.saw(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self.saw(key)
        return super().setdefault(key, default)

    def clear(self) -> None:
        self.emptied()
        super().clear()

    def update(self, *given: Any, **more: Any) -> None:
        for key in dict(*given, **more):
            self.wrote(key)
        super().update(*given, **more)

    def values(self) -> Any:
        for key in self:
            self.saw(key)
        return super().values()

    def items(self) -> Any:
        for key in self:
            self.saw(key)
        return super().items()


class _RecordingList(list[Any], _Recording):
    def __getitem__(self, key: Any) -> Any:
        for position in (
            range(len(self))[key] if isinstance(key, slice) else [range(len(self))[key]]
        ):
            self.saw(position)
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        for position in (
            range(len(self))[key] if isinstance(key, slice) else [range(len(self))[key]]
        ):
            self.wrote(position)
        super().__setitem__(key, value)

    def clear(self) -> None:
        self.emptied()
        super().clear()

    def __delitem__(self, key: Any) -> None:
        if isinstance(key, slice):
            self.emptied()
        super().__delitem__(key)

    def __iter__(self) -> Iterator[Any]:
        for position in range(len(self)):
            self.saw(position)
        return super().__iter__()

    def pop(self, key: Any = -1) -> Any:
        self.saw(range(len(self))[key])
        return super().pop(key)
