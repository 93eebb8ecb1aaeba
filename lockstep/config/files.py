"""Find and read config files.

A file is found by its path, by its name beside the file that extends it, or among those that ship.

Tests: tests/config/test_loading.py, tests/config/test_commands.py, tests/test_ready_configs.py
"""

import difflib
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError, listed
from lockstep.files.paths import local_path

SHIPPED = Path(__file__).parent
ALIASES = {
    "trainers/accel_trainer.yaml": "trainers/accelerate.yaml",
    "trainers/pipeline_trainer.yaml": "trainers/pipeline.yaml",
}
MAX_BYTES = 10_000_000


@dataclass(frozen=True)
class ResolvedFile:
    """The path of a file, and its name for messages."""

    path: Path
    shown: str


def shipped_names() -> list[str]:
    """Return the names of the files that ship, such as `trainers/fsdp.yaml`, without aliases."""
    return sorted(
        f"{folder}/{path.name}"
        for folder in ("trainers", "ready")
        for path in (SHIPPED / folder).glob("*.yaml")
    )


def find(path: str | Path) -> ResolvedFile:
    """Return the file at a path, or else the shipped one of that name.

    `read` raises if there is neither.
    """
    _require_no_null(str(path), None)
    given = local_path(path, "the config")
    file = ResolvedFile(given.resolve(), str(path))
    return file if given.is_absolute() or os.path.exists(given) else _shipped(str(path)) or file


def parent_file(name: str, child: ResolvedFile, where: str) -> ResolvedFile:
    """Return the file that `child` extends: one beside it, or one that ships.

    Raises UsageError: there is neither.
    """
    _require_no_null(name, where)
    local_path(name, where)
    beside = (child.path.parent / name).resolve()
    if os.path.exists(beside):
        return ResolvedFile(
            beside, os.path.normpath(os.path.join(os.path.dirname(child.shown), name))
        )
    shipped = _shipped(name)
    if shipped is not None:
        return shipped
    near = difflib.get_close_matches(name, [*shipped_names(), *ALIASES], n=1)
    fix = f"write {near[0]}" if near else f"the trainers that ship are {', '.join(shipped_names())}"
    text = f"{name!r} is neither beside {child.path.name} nor among the files that ship"
    raise UsageError(text, where=where, fix=fix)


def read(file: ResolvedFile) -> str:
    """Return the text of a file.

    Raises UsageError: the file is missing, a directory, too large, not readable or not text.
    """
    name = file.shown
    if os.path.isdir(file.path):
        inside = sorted(p.name for p in file.path.glob("*.y*ml"))
        fix = f"name a file in it: {', '.join(inside[:5])}" if inside else "name a YAML file"
        raise UsageError(f"{name} is a directory", fix=fix)
    try:
        status = file.path.stat()
        # a device or a pipe may never end, and ranks read the file again
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(
                f"{name} is not a regular file", fix="write the config to a file, and name that"
            )
        if status.st_size > MAX_BYTES:
            fix = "give the YAML file of a config"
            raise UsageError(
                f"{name} has more than {MAX_BYTES // 10**6} MB: it is not a config", fix=fix
            )
        data = file.path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"there is no file {name}", fix=_near_file(file.path)) from None
    except OSError as error:
        fix = "let the file be readable, or name another"
        raise UsageError(f"{name} can't be read: {error.strerror}", fix=fix) from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not a text file (UTF-8)", fix="name a YAML file") from None
    if "\0" in text:
        raise UsageError(f"{name} is a binary file", fix="name a YAML file")
    return text


def _require_no_null(name: str, where: str | None) -> None:
    if "\0" in name:
        raise UsageError(f"{name!r} is not the name of a file", where=where, fix="name a YAML file")


def _shipped(name: str) -> ResolvedFile | None:
    name = ALIASES.get(name, name)
    parts = Path(name).parts
    if len(parts) == 2 and parts[0] in ("trainers", "ready") and os.path.isfile(SHIPPED / name):
        return ResolvedFile(SHIPPED / name, name)
    return None


def _near_file(path: Path) -> str:
    beside = [p.name for p in path.parent.glob("*.y*ml")] if os.path.isdir(path.parent) else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    if near:
        return f"did you mean {near[0]}?"
    if beside:
        names = listed(sorted(beside))
        return (
            f"name a file that is there, such as {names}; `lockstep config list` has those that"
            " ship"
        )
    return "`lockstep config list` names those that ship"
