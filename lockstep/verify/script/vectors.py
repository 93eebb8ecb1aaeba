"""All gradients of a step as one vector, parameter after parameter, and what counts as equal.

Tests: tests/verify/test_algebra.py, tests/verify/test_script.py
"""

import numpy as np

from lockstep.verify.algebra import Values, distance
from lockstep.verify.script.world import Tensors

EXACT = 1e-4  # relative difference up to which gradients are taken for equal
_NO_MORE_THAN_ROUNDING = 1e-6  # relative to the norm of all gradients


def vector(tensors: Tensors, sizes: dict[str, int]) -> Values:
    """Return tensors as one vector; what is missing is 0, and what FSDP1 pads is left out."""
    parts = []
    for name, size in sizes.items():
        flat = np.zeros(0)
        if name in tensors:
            flat = tensors[name].flatten()[:size].double().numpy()
        parts.append(np.pad(flat, (0, size - len(flat))))
    return np.concatenate(parts) if parts else np.zeros(0)


def slices_of(sizes: dict[str, int]) -> dict[str, slice]:
    """Return the slice of each parameter in a vector, from their numbers of elements."""
    ends = np.cumsum(list(sizes.values())).tolist()
    return {
        name: slice(end - size, end) for (name, size), end in zip(sizes.items(), ends, strict=True)
    }


def is_same(mine: Values, right: Values) -> bool:
    """Return whether two gradients are equal up to rounding."""
    return distance(mine, right) <= EXACT


def is_wrong(mine: Values, right: Values, floor: float) -> bool:
    """Return whether a parameter's gradient differs by more than the rounding of all gradients."""
    return not is_same(mine, right) and float(np.linalg.norm(mine - right)) > floor


def floor_of(gradient: Values) -> float:
    """Return the size of a difference that the rounding of all gradients may have made."""
    return _NO_MORE_THAN_ROUNDING * float(np.linalg.norm(gradient))
