"""Finds what a forward pass leaves in a model, and whether it went on from an earlier one's.

Read before and after one pass of the model, or of a stage of it (`PassTraces`):

    self.scale = 0.9 * self.scale + x.mean()   a tensor that it computes with, and replaces: state
    self.cache.append(x)                       a list whose members it uses, and adds to: state
    self.last = loss.item()                    a number that is written alone: no state
    self.calls += 1                            a number that changes by as much in each pass
    torch.rand(3, generator=self.own)          a generator of the model's own that has moved

Tests: tests/parallel/forward_effects/test_state_between_calls.py,
tests/parallel/forward_effects/test_attributes.py
"""

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lockstep.parallel.forward_effects.attribute_changes import OF_TORCH
from lockstep.parallel.forward_effects.kept_numbers import (
    KeptNumber,
    RecordedReads,
    grown,
    kept_numbers,
    members,
    sequence_of,
)
from lockstep.torch_compat.pytree import tree_leaves
from lockstep.torch_compat.tensor_versions import version_of

Mark = tuple[int, int]  # a tensor's identity and version: equal if it was not written


@dataclass(frozen=True)
class Traces:
    """Holds what one pass has left, by names in the model."""

    tensors: list[str]  # tensors that it computed with, and replaced or added to
    numbers: list[str]  # numbers that it read, and replaced or added to
    perhaps: list[str]  # numbers that it replaced, and may have read, which can't be seen
    generators: list[str]  # generators that it drew from
    changes: dict[str, float]  # number among attributes → by how much it has changed


class PassTraces:
    """Compares what a model, or a stage, holds before and after a forward pass.

    Args:
        root: the model, or the stage.
        compiled: blocks of it are compiled, so that no object's class may be changed to see reads.
    """

    def __init__(self, root: nn.Module, *, compiled: bool) -> None:
        self._root = root
        self._compiled = compiled
        # as they were before the first pass; None: there was none
        self._buffers: set[str] | None = None
        self._first_tensors: dict[str, Mark] | None = None
        self._first_numbers: dict[str, KeptNumber] | None = None
        # of the pass that runs
        self.is_open = False
        self._attributes: dict[str, float] = {}
        self._generators: dict[str, Any] = {}
        self._names: set[str] = set()  # of the tensors and numbers that were there before it
        self._uses: _Uses | None = None  # of tensors that earlier passes have left
        self._reads: RecordedReads | None = None  # of numbers that earlier passes have left

    def begin(self) -> None:
        """Note, before a pass, what it could change."""
        self.is_open = True
        self._attributes = dict(_numbers(self._root))
        self._generators = dict(_generators(self._root))
        self._begin_tensors()
        self._begin_numbers()

    def end(self) -> Traces:
        """Return what the pass has left."""
        self.is_open = False
        tensors = self._end_tensors()
        numbers, perhaps = self._end_numbers()
        generators = [
            name
            for name, state in _generators(self._root)
            if name in self._generators and self._generators[name] != state
        ]
        before = self._attributes
        changes = {
            name: value - before[name]
            for name, value in _numbers(self._root)
            if name in before and value != before[name]
        }
        return Traces(tensors, numbers, perhaps, generators, changes)

    def _begin_tensors(self) -> None:
        """Record uses, in the pass that begins, of tensors that earlier passes have left."""
        if self._buffers is None:
            named = self._root.named_buffers(remove_duplicate=False)
            self._buffers = {name for name, _ in named}
        tensors = dict(_tensors(self._root, self._buffers))
        self._names = set(tensors)
        first = self._first_tensors
        if first is None:
            self._first_tensors = {name: _mark(tensor) for name, tensor in tensors.items()}
            return
        longer = grown(first, tensors)
        left = {
            name: tensor
            for name, tensor in tensors.items()
            if first.get(name) != _mark(tensor) or sequence_of(name) in longer
        }
        if left:
            self._uses = _Uses(left)
            self._uses.__enter__()  # type: ignore[no-untyped-call]  # until the pass is over

    def _end_tensors(self) -> list[str]:
        """Return the tensors that the pass has computed with, and replaced or added to."""
        uses = self._uses
        self._uses = None
        if uses is None:
            return []
        uses.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        tensors = dict(_tensors(self._root, self._buffers or set()))
        longer = grown(self._names, tensors)
        replaced = {
            name
            for name in uses.used
            if name not in tensors or _mark(tensors[name]) != uses.marks[name]
        }
        return sorted(replaced | longer.intersection(map(sequence_of, uses.used)))

    def _begin_numbers(self) -> None:
        """Record reads, in the pass that begins, of numbers that earlier passes have left."""
        numbers = kept_numbers(self._root)
        self._names.update(numbers)
        first = self._first_numbers
        if first is None:
            self._first_numbers = numbers
            return
        longer = grown(first, numbers)
        left = {
            name: number
            for name, number in numbers.items()
            if not number.equals(first.get(name)) or sequence_of(name) in longer
        }
        if left:
            self._reads = RecordedReads(left)
            if self._compiled:  # it would be compiled again
                self._reads.unknown.update(left)
            else:
                self._reads.start()

    def _end_numbers(self) -> tuple[list[str], list[str]]:
        """Return the numbers that the pass has read, and replaced or added to, and unknown ones.

        Unknown ones were replaced, and reading of them can't be seen.
        """
        reads = self._reads
        self._reads = None
        if reads is None:
            return [], []
        reads.stop()
        numbers = kept_numbers(self._root)
        longer = grown(self._names, numbers)
        replaced = {
            name for name, old in reads.numbers.items() if not old.equals(numbers.get(name))
        }

        def changed(names: set[str]) -> list[str]:
            return sorted((replaced & names) | longer.intersection(map(sequence_of, names)))

        return changed(reads.read), changed(reads.unknown)


class _Uses(TorchFunctionMode):
    """Records which of some tensors functions of torch are called with."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._kept = list(tensors.values())  # so that no other tensor gets the same id
        self.marks = {name: _mark(tensor) for name, tensor in tensors.items()}
        self.used: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.used |= {
            self._names[id(leaf)] for leaf in tree_leaves((args, kwargs)) if id(leaf) in self._names
        }
        return func(*args, **(kwargs or {}))


def _mark(tensor: Tensor) -> Mark:
    return id(tensor), version_of(tensor)


def _tensors(root: nn.Module, known: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of tensors in modules' attributes.

    Parameters and `known` buffers are left out.
    """
    for name, value in _own_attributes(root):
        yield from _inside(name, value, depth=3)
    for name, buffer in root.named_buffers(remove_duplicate=False):
        if name not in known:
            yield name, buffer


def _inside(name: str, value: Any, *, depth: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of an attribute: itself, or what lies in containers up to a depth."""
    if isinstance(value, Tensor):
        yield name, value
    elif depth:
        for full, member, _ in members(name, value):
            yield from _inside(full, member, depth=depth - 1)


def _numbers(root: nn.Module) -> Iterator[tuple[str, float]]:
    """Yield (name, value) of the numbers among the attributes of its modules."""
    for name, value in _own_attributes(root):
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def _generators(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, state) of the generators among the attributes of its modules."""
    numpy = sys.modules.get("numpy")
    for name, value in _own_attributes(root):
        if isinstance(value, torch.Generator):
            yield name, value.get_state().cpu().numpy().tobytes()
        elif isinstance(value, random.Random):
            yield name, value.getstate()
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            yield name, repr(value.bit_generator.state)
        elif numpy is not None and isinstance(value, numpy.random.RandomState):
            state = value.get_state()
            parts = [part.tolist() if hasattr(part, "tolist") else part for part in state]
            yield name, repr(parts)


def _own_attributes(root: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the attributes that not every module has."""
    for path, module in root.named_modules():
        for name, value in vars(module).items():
            if name not in OF_TORCH:
                yield f"{path}.{name}" if path else name, value
