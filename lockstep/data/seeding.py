"""Random numbers that a dataset draws: a function of what is read, never of who reads it.

Python's, NumPy's and torch's global generators are seeded before each sample is read. Generators that a dataset made
for itself (`numpy.random.default_rng()`) are its own affair.
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
    """Of the three generators."""
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def put_back(kept: tuple[Any, Any, torch.Tensor]) -> None:
    """What `states` gave."""
    random.setstate(kept[0])
    np.random.set_state(kept[1])
    torch.set_rng_state(kept[2])


@contextmanager
def outer_states_kept() -> Iterator[None]:
    """Put the states of the three generators back after: what is drawn inside leaves no trace outside."""
    kept = states()
    try:
        yield
    finally:
        put_back(kept)


def tell_epoch(holder: Any, epoch: int) -> bool:
    """`holder.set_epoch(epoch)`, if it has that; whether it has."""
    if not hasattr(holder, "set_epoch"):
        return False
    holder.set_epoch(epoch)
    return True
