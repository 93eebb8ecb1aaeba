"""Packages of other people: files written outside of the repository, found through PYTHONPATH."""

import os
from pathlib import Path

from tests.forked import lockstep
from tests.ranks import REPOSITORY


class Outside:
    """A folder with a package of its own, and `lockstep` run from there.

    Args:
        folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, text: str) -> Path:
        """Write a file of the package, or a config."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def lockstep(self, *words: object, code: int = 0) -> str:
        """Run a command in the folder and return what it prints; `code` is the exit code that it
        must have.
        """
        # Ranks of their own processes import this tree, too, wherever another one is installed.
        paths = f"{self.folder}{os.pathsep}{REPOSITORY}"
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = lockstep([*map(str, words)], self.folder, environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr
