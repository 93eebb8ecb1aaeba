"""Seeds the random numbers that a dataset draws: they depend on the data that is read, not on the reading process.

Python's, NumPy's and torch's global generators are seeded before each sample is read. Generators that a dataset makes
itself (`numpy.random.default_rng()`) are not covered.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lockstep.randomness import derive_key


def seed_from(*parts: object) -> None:
    """Seed Python, NumPy and torch (its CPU generator) from `parts`."""
    key = derive_key(*parts)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def states() -> tuple[Any, Any, torch.Tensor]:
    """Return the states of the three generators."""
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def set_states(saved: tuple[Any, Any, torch.Tensor]) -> None:
    """Restore what `states` returned."""
    random.setstate(saved[0])
    np.random.set_state(saved[1])
    torch.set_rng_state(saved[2])


@contextmanager
def preserve_states() -> Iterator[None]:
    """Restore the states of the three generators after the block."""
    saved = states()
    try:
        yield
    finally:
        set_states(saved)


def set_epoch(holder: Any, epoch: int) -> bool:
    """Call `holder.set_epoch(epoch)` if there is such a method, and return whether there is."""
    if not hasattr(holder, "set_epoch"):
        return False
    holder.set_epoch(epoch)
    return True
