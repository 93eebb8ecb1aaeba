"""Finds models of the Hugging Face hub: in the hub's cache on this machine, or by a download.

The launcher looks first, before ranks start; they find what it has downloaded.

Tests: tests/models/test_hf_hub.py
"""

import re
from pathlib import Path

from lockstep.errors import UsageError, first_line

_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_WEIGHTS = "*.safetensors"
_FILES = [_WEIGHTS, "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]  # no pickles, no code


def is_name(source: str) -> bool:
    """Return whether `hf:SOURCE` is named as on the hub, OWNER/NAME, and is not a path here."""
    return _NAME.fullmatch(source) is not None and not Path(source).exists()


def local_copy(name: str) -> Path:
    """Return the folder of this machine that holds a model of the hub.

    One in the cache is taken as it is, if it has weights: a run that goes on has the same ones.

    Raises:
        UsageError: the hub does not give it, or gives no safetensors.
    """
    from huggingface_hub import snapshot_download

    try:
        cached = Path(snapshot_download(name, local_files_only=True, allow_patterns=_FILES))
        if any(cached.glob(_WEIGHTS)):
            return cached
    except Exception:
        pass  # not in the cache, which the library says by several kinds of errors
    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:
        raise UsageError(
            f"{name} is neither a folder here nor a model that the hub gives",
            where="model.name",
            why=first_line(error),
            fix="write the path of a folder; or check the name, and the network of this machine",
        ) from error
    if not any(folder.glob(_WEIGHTS)):
        raise UsageError(
            f"{name} has no weights in safetensors, neither in the hub's cache nor on the hub",
            where="model.name",
            why="values would be drawn at random; and pickles can run code when they are read",
            fix="convert them to safetensors, and write the path of the folder",
        )
    return folder
