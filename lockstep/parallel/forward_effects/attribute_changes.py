"""Notices that modules' attributes have been replaced, for microseconds a step.

Whether a number is state that the next forward pass goes on from is found out by a look at whole
passes (`lockstep.parallel.forward_effects.side_effects`), too slow for each step. Here only
identities of objects are compared, in C: some 0.3 µs a module. What changes for the first time asks
for a look. Modules of torch itself keep no numbers, and tensors are left to the looks that come
anyway, as a reference would keep them in memory. Parameters and modules that were replaced are seen
as well, but not under FSDP2, which itself puts gathered parameters in the place of pieces.

Tests: tests/parallel/forward_effects/test_state_between_calls.py
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain, compress
from operator import is_not
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lockstep.attributes import attributes_of
from lockstep.torch_compat.module_members import registered

OF_TORCH = frozenset(vars(nn.Module()))  # names of the attributes that every module has
_DEPTH = 2  # containers in containers
_MOST_MEMBERS = 64  # of a container that is looked into

_Slot = tuple[int, int]  # id of a container, and the place in it


class AttributeChanges:
    """The attributes of some modules, as they were when they were last taken as known."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = roots
        self._is_gathered = any(
            isinstance(module, FSDPModule) for root in roots for module in root.modules()
        )
        self._known: set[_Slot] = set()  # that have changed before
        self._resized: set[int] = set()  # containers whose size has changed before
        self._read()

    def has_new(self) -> bool:
        """Return whether something has been replaced that never was before."""
        if any(self._empty.values()) or sum(map(len, self._views)) != self._size:
            return True
        is_other = map(is_not, chain.from_iterable(self._views), self._values)
        changed = set(compress(self._places, is_other))
        return not changed <= self._passed_over

    def take_as_known(self) -> None:
        """Take what is there now as known; what has changed is not asked about again."""
        begin = 0
        for key, view, size in zip(self._keys, self._views, self._sizes, strict=True):
            before = self._values[begin : begin + size]
            if len(view) == size:
                changed = compress(range(size), map(is_not, view, before))
                self._known.update((key, position) for position in changed)
            elif not isinstance(self._containers_by_id[key][0], nn.Module):
                self._resized.add(key)
            begin += size
        self._resized.update(key for key, view in self._empty.items() if view)
        self._read()

    def _read(self) -> None:
        """Find the containers, and keep what is in them."""
        containers: dict[int, tuple[Any, Collection[Any]]] = {}
        for root in self._roots:
            for module in root.modules():
                if not self._is_gathered:
                    for held in registered(module):
                        containers[id(held)] = (held, held.values())
                if not _is_torchs_own(module):
                    containers[id(module)] = (module, vars(module).values())
                    own = (v for name, v in vars(module).items() if name not in OF_TORCH)
                    for kept, view in _containers(own, _DEPTH):
                        containers.setdefault(id(kept), (kept, view))
        for known in self._resized:
            containers.pop(known, None)
        self._containers_by_id = containers
        self._empty = {key: view for key, (_, view) in containers.items() if not view}
        filled = {key: view for key, (_, view) in containers.items() if view}
        self._keys = list(filled)
        self._views = list(filled.values())
        self._sizes = list(map(len, self._views))
        slots: list[_Slot] = [
            (key, position)
            for key, size in zip(self._keys, self._sizes, strict=True)
            for position in range(size)
        ]
        self._places = range(len(slots))
        values = list(chain.from_iterable(self._views))
        self._size = len(values)
        tensors = {
            position
            for position, value in enumerate(values)
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        }
        self._values = [None if position in tensors else v for position, v in enumerate(values)]
        of_torch = {
            (key, position)
            for key in self._keys
            for position in range(_of_torch(containers[key][0]))
        }
        expected = self._known | of_torch
        changed = {position for position, slot in enumerate(slots) if slot in expected}
        self._passed_over = tensors | changed


def _of_torch(container: Any) -> int:
    """Return how many of the first members are what torch keeps in each module."""
    if not isinstance(container, nn.Module):
        return 0
    names = list(vars(container))[: len(OF_TORCH)]
    return len(names) if OF_TORCH.issuperset(names) else 0


def _is_torchs_own(module: nn.Module) -> bool:
    return all(cls.__module__.partition(".")[0] in _TORCHS for cls in type(module).__mro__)


_TORCHS = ("torch", "builtins")


def _containers(values: Iterable[Any], depth: int) -> Iterator[tuple[Any, Collection[Any]]]:
    """Yield the small containers and plain objects among values, each with its members."""
    for value in values:
        members = _members(value)
        if members is not None and len(members) <= _MOST_MEMBERS:
            yield value, members
            if depth > 1:
                yield from _containers(list(members), depth - 1)


def _members(value: object) -> Collection[Any] | None:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple | deque):
        return value
    if callable(value) or isinstance(value, nn.Module | type | Tensor):
        return None
    own = attributes_of(value)
    return None if own is None else own.values()
