"""Long lists of cases: the quick run has some, and `full` the rest."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def sampled(name: str, cases: Sequence[Any], one_in: int) -> pytest.MarkDecorator:
    """Parametrize a test by the list of cases that one launch runs: one in so many, the first among
    them; and, marked `full`, those between.
    """
    rest = [case for place, case in enumerate(cases) if place % one_in]
    return pytest.mark.parametrize(
        name,
        [
            pytest.param(list(cases[::one_in]), id="some"),
            pytest.param(rest, id="rest", marks=pytest.mark.full),
        ],
    )


def quick_and_full(names: Iterable[Any], quick: Sequence[Any]) -> list[Any]:
    """Return a parameter for each name; those that are not among `quick` are marked `full`."""
    every = list(names)
    assert set(quick) <= set(every), f"there is no {', '.join(map(str, set(quick) - set(every)))}"
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in every]


def of_module(request: pytest.FixtureRequest) -> list[Any]:
    """Return this run's tests of the module."""
    return [item for item in request.session.items if item.path == request.path]


def chosen(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Return the values of a parameter that this run's tests of the module have, for a fixture that
    runs all of them in one launch.
    """
    calls = [item.callspec.params for item in of_module(request) if hasattr(item, "callspec")]
    return list(dict.fromkeys(params[name] for params in calls if name in params))
