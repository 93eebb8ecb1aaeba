"""Finds the random generators that a dataset or a collate function has of its own, and seeds them.

What such a generator gives depends on who has drawn from it before: on the numbers of ranks and
workers. Seeded before each sample, like Python's, NumPy's and torch's global generators, it gives
the same on all of them.

Searched are attributes, containers, closures and what functions refer to in their modules.
Generators that exist during a call alone, or in compiled code, are not found.
"""

import functools
import inspect
import itertools
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from lockstep.attributes import attributes_of
from lockstep.data.mistakes import is_users_file
from lockstep.randomness import derive_key

Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState

_MOST_OBJECTS = 10_000  # that are looked at
_MOST_ITEMS = 32  # of a container
_LEAVES = (str, bytes, int, float, torch.Tensor, np.ndarray, type, types.ModuleType)
# Most parts of an object are of these types, which refer to nothing that could draw.
_OFTEN = frozenset(
    {
        *(str, bytes, int, float, bool, type, type(None)),
        types.ClassMethodDescriptorType,
        types.GetSetDescriptorType,
        types.MemberDescriptorType,
        types.MethodDescriptorType,
        types.MethodWrapperType,
        types.WrapperDescriptorType,
    }
)
# The global ones: the functions of the modules are their methods.
_OF_PYTHON: Any = inspect.unwrap(random.random)  # an observer wraps it
_OF_NUMPY: Any = inspect.unwrap(np.random.rand)
_GLOBALS = (_OF_PYTHON.__self__, _OF_NUMPY.__self__, torch.default_generator)


def generators_of(root: Any) -> dict[str, Generator]:
    """Return the generators that an object holds, by a name such as `transform.rng`.

    The global generators are left out.
    """
    generators: dict[str, Generator] = {}
    seen: dict[int, Any] = {}  # the objects are kept alive, so that their ids are not used again
    waiting = deque([("", root)])
    while waiting and len(seen) < _MOST_OBJECTS:
        name, value = waiting.popleft()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen[id(value)] = value
        if isinstance(value, Generator):
            if not any(value is generator for generator in _GLOBALS):
                # an attribute of the class, hidden by the object's
                generators[name + "'" * (name in generators)] = value
        else:
            waiting += [
                (f"{name}.{part}".strip("."), its)
                for part, its in _parts(value)
                if type(its) not in _OFTEN and id(its) not in seen
            ]
    return generators


def can_be_seeded(generator: Generator) -> bool:
    """Return whether what the generator draws follows from a seed."""
    return not isinstance(generator, random.SystemRandom)


def seed_generators(generators: Mapping[str, Generator], *parts: object) -> None:
    """Seed generators from `parts` and their names."""
    for name, generator in generators.items():
        key = derive_key(*parts, name)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key)
        elif isinstance(generator, random.Random):
            generator.seed(key)
        elif isinstance(generator, np.random.RandomState):
            generator.seed([key & 0xFFFFFFFF, key >> 32])
        else:
            generator.bit_generator.state = type(generator.bit_generator)(key).state


@contextmanager
def preserve(generators: Mapping[str, Generator]) -> Iterator[None]:
    """Restore the states of generators after the block: a model may share one of them."""
    states = states_of(generators)
    try:
        yield
    finally:
        restore(generators, states)


def states_of(generators: Mapping[str, Generator]) -> list[Any]:
    """Return the states of generators, for `restore`."""
    return [_state_of(generator) for generator in generators.values()]


def restore(generators: Mapping[str, Generator], states: list[Any]) -> None:
    """Restore what `states_of` returned."""
    for generator, state in zip(generators.values(), states, strict=True):
        _set_state(generator, state)


def _state_of(generator: Generator) -> Any:
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: Generator, state: Any) -> None:
    if isinstance(generator, random.SystemRandom):
        return
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, with names."""
    if isinstance(value, dict):  # no other mappings: one may be a file
        yield from ((str(key), part) for key, part in itertools.islice(value.items(), _MOST_ITEMS))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (
            (str(index), part) for index, part in enumerate(itertools.islice(value, _MOST_ITEMS))
        )
    elif isinstance(value, functools.partial):
        yield from (("", value.func), ("", value.args), ("", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, types.BuiltinMethodType):  # such as `random.Random(3).random`
        yield "", value.__self__
    elif isinstance(value, types.FunctionType):
        yield from _parts_of_function(value)
    else:
        yield from list((attributes_of(value) or {}).items())
        for name in getattr(type(value), "__slots__", ()):
            with suppress(Exception):  # one that is not set may be asked of a __getattr__
                yield name, getattr(value, name)
        for base in type(value).__mro__:
            yield from vars(base).items()


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # it has none yet
            continue
    yield from ((str(index), default) for index, default in enumerate(function.__defaults__ or ()))
    yield from (function.__kwdefaults__ or {}).items()
    if is_users_file(code.co_filename):  # a library's own generators may not be meant for samples
        yield from (
            (name, function.__globals__[name])
            for name in code.co_names
            if name in function.__globals__
        )
