"""Puts back the files that a script saves in a run, so that no run finds those of another.

A script may save snapshots, and begin from the last one if it is there. Each run of a proof has to
begin from the same files, and what was there before is the user's. Before a file is saved a process
writes into the run's folder:

    saved/<digest>.json      the path, whether it was there, the outermost folder made for it
    saved/<digest>.before    what was there

New files that are saved before training begins, as data that are prepared once, stay.

Tests: tests/verify/test_saved_files.py, tests/verify/test_script.py
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class SavedFiles:
    """Notes the files that this process saves, and what was there before.

    Args:
        folder: of the run, in which it notes them.
        has_begun: whether training has begun.
    """

    def __init__(self, folder: Path, has_begun: Callable[[], bool]) -> None:
        self._folder = folder
        self._has_begun = has_begun
        self._saved: set[str] = set()
        self._made: set[str] = set()  # folders

    def watch(self) -> None:
        """Look at folders that are made, and at files that are renamed or copied, from now on."""
        sys.addaudithook(self._look)

    def _look(self, event: str, given: tuple[Any, ...]) -> None:
        if event not in ("os.mkdir", "os.rename", "shutil.copyfile"):
            return
        with suppress(OSError, TypeError, ValueError):  # whoever calls it meets the same
            path = _absolute(given[0])
            if event == "os.mkdir":
                if not os.path.isdir(path):
                    self._made.add(path)
            elif path in self._saved:
                self.save(given[1])

    def save(self, path: Any) -> None:
        """Note a file that is about to be saved; what is not a path is left alone."""
        if not isinstance(path, str | os.PathLike):
            return
        file = _absolute(path)
        existed = os.path.isfile(file)
        is_own = Path(file).is_relative_to(_absolute(self._folder.parent))
        if is_own or file in self._saved or not (existed or self._has_begun()):
            return
        self._saved.add(file)
        self._folder.mkdir(exist_ok=True)
        digest = hashlib.sha1(file.encode(), usedforsecurity=False).hexdigest()[:16]
        noted = {"path": file, "existed": existed, "made": self._outermost_made(file)}
        try:
            with (self._folder / f"{digest}.json").open("x") as note:
                json.dump(noted, note)
        except FileExistsError:  # another rank saves it, too
            return
        if existed:
            part = self._folder / f"{digest}.part"
            shutil.copy2(file, part)
            part.rename(part.with_suffix(".before"))

    def _outermost_made(self, file: str) -> str:
        """Return the outermost folder around a file that this process has made; or empty."""
        made = [str(parent) for parent in Path(file).parents if str(parent) in self._made]
        return made[-1] if made else ""


def put_back(folder: Path) -> bool:
    """Put back what the processes of a run have noted in a folder; return whether it is anything.

    Files that were not there are removed, with the folders that were made for them.
    """
    notes = sorted(folder.glob("*.json"))
    for note in notes:
        with suppress(OSError, ValueError):  # a process that was killed may have noted a part
            noted = json.loads(note.read_text())
            before = note.with_suffix(".before")
            if not noted["existed"]:
                Path(noted["path"]).unlink(missing_ok=True)
            elif before.exists():
                shutil.move(before, noted["path"])
            if noted["made"]:
                shutil.rmtree(noted["made"], ignore_errors=True)
    return bool(notes)


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))
