"""Imports libraries that log warnings which say nothing about the run.

Tests: tests/machine/test_quiet_imports.py
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_warnings_of_imports() -> Iterator[None]:
    """Drop the warnings that are logged in this block.

    torchao, which transformers imports where it is installed, warns on every CPU of kernels for
    other devices that do not load, and of enumerations that a later torch treats in another way.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
