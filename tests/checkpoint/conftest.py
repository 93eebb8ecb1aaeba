"""These tests sync thousands of small files: where there is a file system in memory, disks set no
pace.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint import places

_IN_MEMORY = Path("/dev/shm")


def _fresh() -> Iterator[Path]:
    root = Path(tempfile.mkdtemp(dir=_IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None))
    (root / "test").mkdir()
    yield root / "test"
    shutil.rmtree(root)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    yield from _fresh()


@pytest.fixture(params=places.tested())
def place(request: pytest.FixtureRequest, tmp_path: Path) -> places.Place:
    """An empty storage: a folder, one in memory, one that LOCKSTEP_TEST_STORAGE names, a bucket."""
    return places.made_for(request, tmp_path)


@pytest.fixture(scope="module")
def module_path() -> Iterator[Path]:
    """A folder that the tests of a module share."""
    yield from _fresh()


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 64 KiB."""
    folder = tmp_path / "shm"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a tmpfs can't be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)
