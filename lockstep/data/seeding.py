"""Random numbers that a dataset draws: a function of what is read, never of who reads it.

Python's, NumPy's and torch's global generators are seeded before each sample is read. Generators that a dataset made
for itself (`numpy.random.default_rng()`) are its own affair.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from lockstep.randomness import derive_key


def seed_from(*parts: object) -> None:
    """Seed Python, NumPy and torch (its CPU generator) from `parts`."""
    key = derive_key(*parts)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


@contextmanager
def outer_states_kept() -> Iterator[None]:
    """Put the states of the three generators back after: what is drawn inside leaves no trace outside."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(pytorch)
