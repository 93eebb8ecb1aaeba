"""Helpers of the tests of the config room."""

from pathlib import Path

import pytest

from lockstep.config import Config, load_config
from lockstep.errors import UsageError


def written(folder: Path, text: str, name: str = "run.yaml") -> Path:
    """A config file in `folder`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder: Path, text: str, *overrides: str) -> Config:
    """The config that `text` in a file and `overrides` make."""
    return load_config(written(folder, text), overrides)


def refusal(folder: Path, text: str, *overrides: str) -> str:
    """The message with which they are refused, the folder's name taken out."""
    with pytest.raises(UsageError) as caught:
        loaded(folder, text, *overrides)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{folder}/", "")
