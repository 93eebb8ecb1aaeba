"""The names on disk: which folder is a checkpoint, which is still being written, which was laid aside.

    step-00000100/                          a checkpoint: it exists because its last file was in place
    step-00000100.tmp-HOST-PID-RANDOM/      being written, or left behind by a writer that died; never read
    .shared.tmp-HOST-PID-RANDOM/            made for a moment, to see whether all ranks see it; swept like the one above
    step-00000100.aside-RANDOM/             taken out of the row by `set_aside`; never read, never deleted

Every pattern is matched against the whole name, so that nothing but the first form is taken for a checkpoint.
"""

import os
import re
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError

MANIFEST = "manifest.json"
STATE = "state.json"
CONFIG = "config.yaml"
METADATA = ".metadata"  # in each part: what lies where in its tensor files
MODEL = "model"

_STEP = re.compile(r"step-([0-9]{8,})")
SHARED_MARK = ".shared"  # by which ranks find out whether they see one folder
_UNFINISHED = re.compile(r"(?:step-[0-9]{8,}|\.shared)\.tmp-([A-Za-z0-9._-]+)-([0-9]+)-([0-9a-f]{8})")
_PART = re.compile(r"model|(?:optimizer|extra)/[A-Za-z0-9_][A-Za-z0-9_.-]*")
_TENSOR_FILE = re.compile(r"\.metadata|__[0-9]+_[0-9]+\.distcp|rank-[0-9]{5,}\.raw")


def step_name(step: int) -> str:
    """`step-00000100` for 100: at least eight digits, so that names sort as steps do."""
    if step < 0:
        raise UsageError(f"a step is not negative, but {step} was to be saved", fix="count steps from 0")
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step of a checkpoint's folder name; None for every other name."""
    match = _STEP.fullmatch(name)
    if match is None:
        return None
    step = int(match[1])
    return step if step_name(step) == name else None  # step-000000100 would be a second name of step 100


def list_checkpoints(directory: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints in a folder, by step, oldest first; whole or not (`verify` tells). A folder that is not there has
    none.
    """
    try:
        entries = [entry for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(step, Path(entry.path)) for entry in entries if (step := step_of(entry.name)) is not None]
    return [path for _, path in sorted(found)]


@dataclass(frozen=True)
class Writer:
    """Who writes an unfinished folder: its host, its process id there, and a random token."""

    host: str
    pid: int
    token: str

    @classmethod
    def new(cls) -> "Writer":
        """This process, with a token of its own."""
        host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()) or "host"
        return cls(host, os.getpid(), secrets.token_hex(4))

    def folder(self, name: str) -> str:
        """The unfinished folder of what will be called `name`."""
        return f"{name}.tmp-{self.host}-{self.pid}-{self.token}"

    @classmethod
    def of(cls, folder: str) -> "Writer | None":
        """The writer of an unfinished folder, by its name; None for every other name."""
        match = _UNFINISHED.fullmatch(folder)
        return cls(match[1], int(match[2]), match[3]) if match else None


def aside_name(step: int) -> str:
    """What a checkpoint is called that is taken out of the row."""
    return f"{step_name(step)}.aside-{secrets.token_hex(4)}"


def raw_file(part: str, rank: int) -> str:
    """What one rank writes of a part under `format: local`, inside the checkpoint."""
    return f"{part}/rank-{rank:05d}.raw"


def optimizer_part(name: str) -> str:
    """The folder of an optimizer's state, inside the checkpoint."""
    return _checked(f"optimizer/{name}")


def extra_part(name: str) -> str:
    """The folder of further tensors, inside the checkpoint."""
    return _checked(f"extra/{name}")


def is_part(text: str) -> bool:
    """Whether `text` names a folder of tensors inside a checkpoint: model, optimizer/NAME or extra/NAME."""
    return _PART.fullmatch(text) is not None


def is_listed_file(text: str) -> bool:
    """Whether a manifest may list `text`: the two files at the top, and tensor files inside a part. Nothing can climb
    out.
    """
    part, _, name = text.rpartition("/")
    return text in (STATE, CONFIG) or (is_part(part) and _TENSOR_FILE.fullmatch(name) is not None)


def _checked(part: str) -> str:
    if not is_part(part):
        raise UsageError(
            f"{part.partition('/')[2]!r} can't name a part of a checkpoint",
            why="it becomes a folder: letters, digits, '_', '-' and '.', not starting with '-' or '.'",
        )
    return part
