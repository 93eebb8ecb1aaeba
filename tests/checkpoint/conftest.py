"""These tests sync thousands of small files: where there is a file system in memory, disks set no pace."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_IN_MEMORY = Path("/dev/shm")


def _fresh() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(dir=_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None))
    (root / "test").mkdir()
    yield root / "test"
    shutil.rmtree(root)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    yield from _fresh()


@pytest.fixture(scope="module")
def module_path() -> Iterator[Path]:
    """A folder that the tests of a module share."""
    yield from _fresh()
