"""Draws of random numbers that a training script makes, and its seeds, seen by an observer.

Public torch: none; torch, NumPy and Python draw by functions, each of which is replaced. Seen to
work: torch 2.13.0. When gone: a function that torch no longer has is not watched, and
`lockstep verify SCRIPT` does not see what its successor draws.
"""

import random
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import torch

from lockstep.torch_compat.function_transforms import has_no_values
from lockstep.torch_compat.replaced_calls import NestedCalls, Undo, put_in_place, undo_all

Drawn = Callable[[str, Callable[[], Any]], Any]
"""Is given the name of a draw, and a call that makes it; returns the numbers for the script."""

_OF_TORCH = (
    "bernoulli",
    "multinomial",
    "normal",
    "poisson",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
)

_OF_TENSORS = (
    "bernoulli",
    "bernoulli_",
    "cauchy_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "multinomial",
    "normal_",
    "random_",
    "uniform_",
)

_OF_NUMPY = (
    "beta",
    "binomial",
    "choice",
    "dirichlet",
    "exponential",
    "gamma",
    "integers",
    "laplace",
    "lognormal",
    "multinomial",
    "normal",
    "permutation",
    "poisson",
    "rand",
    "randint",
    "randn",
    "random",
    "random_sample",
    "standard_normal",
    "triangular",
    "uniform",
)

_OF_PYTHON = (
    "betavariate",
    "expovariate",
    "gauss",
    "normalvariate",
    "randint",
    "random",
    "randrange",
    "triangular",
    "uniform",
)

_OF_POPULATIONS = ("choice", "choices", "sample")

PERMUTATIONS = (
    "torch.randperm",
    "numpy.random.permutation",
    "numpy.random.shuffle",
    "random.shuffle",
)


def patch_draws(drawn: Drawn) -> None:
    """Let `drawn` make each draw of random numbers: of torch, NumPy and Python, by name.

    It makes those of generators of the script's own, too.
    """
    once = _not_within_draws(drawn)
    places: tuple[tuple[Any, int], ...] = ((random, 0), (random.Random, 1))
    for chooser, generators in places:
        for name in _OF_POPULATIONS:
            chosen = _choosing(getattr(chooser, name), f"random.{name}", generators, once)
            put_in_place(chooser, name, chosen)
    for owner, prefix, names in (
        (torch, "torch", _OF_TORCH),
        (torch.Tensor, "Tensor", _OF_TENSORS),
        (np.random, "numpy.random", _OF_NUMPY),
        (random, "random", _OF_PYTHON),
        (random.Random, "random", _OF_PYTHON),
    ):
        for name in names:
            if hasattr(owner, name):
                put_in_place(owner, name, _drawing(getattr(owner, name), f"{prefix}.{name}", once))
    for owner, name in (
        (np.random, "numpy.random.shuffle"),
        (random, "random.shuffle"),
        (random.Random, "random.shuffle"),
    ):
        put_in_place(owner, "shuffle", _shuffling(owner.shuffle, name, once))
    bit_generator_of = np.random.default_rng
    generator = _observed_class(np.random.Generator, once)
    put_in_place(np.random, "Generator", generator)
    put_in_place(np.random, "RandomState", _observed_class(np.random.RandomState, once))
    put_in_place(
        np.random,
        "default_rng",
        lambda seed=None: generator(bit_generator_of(seed).bit_generator),
    )


def _not_within_draws(drawn: Drawn) -> Drawn:
    """Return what leaves a draw within another alone, as `random.randint` calls `randrange`."""
    nesting = NestedCalls()

    def observed(name: str, call: Callable[[], Any]) -> Any:
        return call() if nesting.is_within() else drawn(name, nesting.entered(call))

    return observed


class _InstancesOfBase(type):
    """Takes the instances of a class's base for its own."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__mro__[1])


def _observed_class(original: type, drawn: Drawn) -> Any:
    """Return a class of NumPy's generators whose draws are made by `drawn`."""
    methods: dict[str, Any] = {
        name: _drawing(getattr(original, name), f"numpy.random.{name}", drawn)
        for name in _OF_NUMPY
        if hasattr(original, name)
    }
    methods["shuffle"] = _shuffling(getattr(original, "shuffle"), "numpy.random.shuffle", drawn)  # noqa: B009
    return _InstancesOfBase(original.__name__, (original,), methods)


def _drawing(original: Callable[..., Any], name: str, drawn: Drawn) -> Callable[..., Any]:
    @wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        if has_no_values():
            return original(*args, **kwargs)
        return drawn(name, lambda: original(*args, **kwargs))

    return observed


def _choosing(
    original: Callable[..., Any], name: str, generators: int, drawn: Drawn
) -> Callable[..., Any]:
    """Return a function or method that chooses objects by positions, so that these are drawn.

    Numbers are drawn themselves. `generators`: number of arguments before the population.
    """

    @wraps(original)
    def observed(*args: Any, **kwargs: Any) -> Any:
        """Choose as the function does, with what is drawn in place of its own draw."""
        if has_no_values():
            return original(*args, **kwargs)
        before = args[:generators]
        rest = args[generators + 1 :]
        objects = args[generators] if len(args) > generators else ()
        has_counts = kwargs.get("counts") is not None
        are_objects = isinstance(objects, Sequence) and not isinstance(objects, str | bytes | range)
        if not are_objects or has_counts or all(isinstance(x, int | float) for x in objects):
            return drawn(name, lambda: original(*args, **kwargs))
        positions = range(len(objects))
        chosen = drawn(name, lambda: original(*before, positions, *rest, **kwargs))
        if isinstance(chosen, list):
            return [objects[at] for at in chosen if at < len(objects)]
        return objects[chosen]

    return observed


def _shuffling(original: Callable[..., Any], name: str, drawn: Drawn) -> Callable[..., Any]:
    """Return a function or method that shuffles by positions, so that these are what is drawn."""

    def positions(generator: tuple[Any, ...], count: int) -> list[int]:
        order = list(range(count))
        original(*generator, order)
        return order

    def observed(*args: Any, **kwargs: Any) -> Any:
        *generator, values = args or (None,)
        has_axis = len(generator) > 1 or bool(kwargs)
        if has_axis or not isinstance(values, list | np.ndarray):
            return original(*args, **kwargs)
        order = drawn(name, lambda: positions(tuple(generator), len(values)))
        values[:] = values[order] if isinstance(values, np.ndarray) else [values[i] for i in order]
        return None

    return observed


def patch_seeds(seeded: Callable[[Any], None]) -> Undo:
    """Report each seed that is given to the generators of torch, NumPy and Python."""

    def seeding(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            seeded((*args, *kwargs.values()))
            return original(*args, **kwargs)

        return observed

    places = ((torch, "manual_seed"), (np.random, "seed"), (random, "seed"))
    return undo_all(
        [put_in_place(owner, name, seeding(getattr(owner, name))) for owner, name in places]
    )
