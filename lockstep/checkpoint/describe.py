"""What a checkpoint is, without loading it."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.checkpoint.keep import newest
from lockstep.checkpoint.manifest import Manifest, read_manifest
from lockstep.checkpoint.names import MANIFEST, list_checkpoints, step_of
from lockstep.checkpoint.restore import read_state
from lockstep.errors import UsageError


@dataclass(frozen=True)
class Inspection:
    """What `inspect` finds.

    Args:
        part_bytes: `model`, `optimizer/NAME`, `extra/NAME` → bytes of its files.
        num_elements: of the model, tied ones counted once.
    """

    path: Path
    manifest: Manifest
    state: Mapping[str, Any]
    part_bytes: Mapping[str, int]
    num_elements: int


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """Read the manifest and the state of one checkpoint.

    Raises:
        UsageError: there is no checkpoint at `path`.
        DamagedError: its manifest is not what was written.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    sizes = {
        part: sum(facts.size for file, facts in manifest.files.items() if file.rpartition("/")[0] == part)
        for part in manifest.parts
    }
    elements = sum(math.prod(facts.shape) for facts in manifest.parameters.values())
    return Inspection(folder, manifest, read_state(folder), sizes, elements)


def checkpoints_at(path: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints that a path means: itself, or those of a folder of checkpoints or of a run directory, oldest
    first.

    Raises:
        UsageError: there are none.
    """
    given = Path(path)
    if step_of(given.resolve().name) is not None or (given / MANIFEST).exists():
        return [given]
    for folder in (given / "checkpoints", given):
        if found := list_checkpoints(folder):
            return found
    raise UsageError(
        f"there is no checkpoint in {given}" if given.exists() else f"{given} does not exist",
        fix="give a run directory, its folder checkpoints/, or one checkpoint in it",
    )


def newest_at(path: str | os.PathLike[str]) -> Path:
    """The one checkpoint that a path means: itself, or the newest whole one of a folder or a run directory."""
    found = checkpoints_at(path)
    if found == [Path(path)]:
        return found[0]
    chosen = newest(found[0].parent)
    assert chosen is not None, "there are some, and `newest` raises where none is whole"
    return chosen
