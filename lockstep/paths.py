"""Takes what a user gives as a path: a place in this machine's file system.

Does not import torch.
"""

import os
import re
from pathlib import Path

from lockstep.errors import Contradiction, refuse

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
        " mounted bucket; "
    )
    fix += "checkpoints alone can be kept in a storage of your own (checkpoint.storage)"
    return Contradiction((where,), f"{scheme}://{rest} is a URL, not a path", fix, why)
