"""Takes what a user gives as a path: a place in this machine's file system.

Does not import torch.
"""

import os
import re
import zlib
from pathlib import Path

from lockstep.errors import Contradiction, refuse
from lockstep.files.object_client import SCHEMES, require_url

RUNS = "LOCKSTEP_RUNS"  # a folder that takes all run directories, of a proof

# `Path` makes s3:/bucket of s3://bucket. One letter may be a drive.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+")


def local_path(path: str | os.PathLike[str], where: str) -> Path:
    """Return a path of the file system; `where` names the key, flag or argument that gave it.

    Raises UsageError: it is a URL, of which `Path` would make a folder in the current directory.
    """
    if (found := url_as_path(path, where)) is not None:
        refuse([found])
    return Path(path)


def url_as_path(path: str | os.PathLike[str], where: str) -> Contradiction | None:
    """Return what is wrong with a URL where a path belongs; None for a path."""
    text = os.fspath(path)
    match = _SCHEME.match(text)
    if match is None:
        return None
    scheme = match[1]
    rest = text[match.end() :]
    if scheme == "file":
        return Contradiction(
            (where,), f"file:///{rest} is a URL, not a path", f"write the path alone: /{rest}"
        )
    why = (
        "files are read and written in the file system alone: a folder of this name would be made"
        " here"
    )
    fix = (
        "give a folder that stays when this machine goes, such as a disk of the network or a"
        " mounted bucket; `lockstep train CONFIG --output-dir s3://BUCKET/PREFIX` keeps a run in a"
        " bucket, and checkpoint.storage its checkpoints alone"
    )
    return Contradiction((where,), f"{scheme}://{rest} is a URL, not a path", fix, why)


def bucket_url(path: str | os.PathLike[str], where: str) -> str | None:
    """Return the URL of a bucket, where one may stand in place of a path; None for a path.

    Raises UsageError: it is another URL, or one that `Path` has changed.
    """
    if isinstance(path, str) and is_bucket_url(path):
        require_url(path, where)
        return path.rstrip("/")
    local_path(path, where)
    return None


def is_bucket_url(text: str) -> bool:
    """Return whether a text begins as the URL of a bucket does."""
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme in SCHEMES


def run_directory(named: Path) -> Path:
    """Return the run directory that `named` stands for.

    A proof of a script is not a run: it leaves the user's folders as they are, and each run
    directory that the script names is another one, in the proof's own folder, which is empty.
    """
    folder = os.environ.get(RUNS)
    if folder is None or named.is_relative_to(folder):  # the launcher of a rank has asked before
        return named
    encoded = os.fsencode(named.absolute())
    return Path(folder, f"{zlib.crc32(encoded):08x}-{named.name}")
