"""Python's garbage collections, which stop a step."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def what_is_there_kept() -> Iterator[None]:
    """Collections inside do not look at what is there now: the model, its modules, all of torch."""
    already = gc.get_freeze_count() > 0  # by the caller's own hand, or by another run around this one
    gc.freeze()
    try:
        yield
    finally:
        if not already:
            gc.unfreeze()
