"""The outputs of modules in a step, call by call, compared with those of another.

Tests: tests/verify/test_values_of_ranks.py, tests/verify/test_script.py
"""

from collections.abc import Sequence

import numpy as np

Flow = Sequence[tuple[str, float, float]]
"""Name and output, as two numbers, of each call of a module."""


def is_same_flow(mine: Flow, right: Flow) -> bool:
    """Return whether two steps call the same modules, which return the same up to rounding."""
    return bool(mine) and not first_module(mine, right)


def first_module(mine: Flow, right: Flow) -> str:
    """Return the first module whose output differs; empty if none does.

    A wrapper may call modules around those that one process calls: these are left out.
    """
    called = {name for name, *_ in mine} & {name for name, *_ in right}
    mine = [call for call in mine if call[0] in called]
    right = [call for call in right if call[0] in called]
    for (name, *numbers), (other, *right_numbers) in zip(mine, right, strict=False):
        if name != other or not is_same_output(numbers, right_numbers):
            return name or "the model"
    return "" if len(mine) == len(right) else "the number of calls"


def first_output_of_all(ranks: Sequence[Flow], right: Flow) -> str | None:
    """Return the first module whose output all ranks have alike, and one process has another.

    None if there is none, or ranks do not call the same modules as one process.
    """
    flows = [right, *ranks]
    called = set.intersection(*({name for name, *_ in flow} for flow in flows))
    flows = [[call for call in flow if call[0] in called] for flow in flows]
    for (name, *numbers), *calls in zip(*flows, strict=False):
        if any(other != name for other, *_ in calls):
            return None
        (_, *mine), *others = calls
        is_alike = all(is_same_output(other, mine) for _, *other in others)
        if is_alike and not is_same_output(mine, numbers):
            module: str = name
            return module
    return None


def is_same_output(mine: Sequence[float], right: Sequence[float]) -> bool:
    """Return whether a module returns the same, by two numbers of each output."""
    return np.allclose(mine, right, rtol=1e-4, atol=1e-6)
