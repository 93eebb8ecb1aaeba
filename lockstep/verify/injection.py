"""Has other Python processes observe themselves from their start: `injected/sitecustomize.py` is put on their path."""

import os
import runpy
from pathlib import Path

_FOLDER = Path(__file__).parent / "injected"


def injected(**variables: str) -> dict[str, str]:
    """Return the environment of a process that observes itself, as variables tell `sitecustomize.py`."""
    path = [str(_FOLDER), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **variables}


def inject(**variables: str) -> None:
    """Have this process and those that it starts observe themselves."""
    os.environ.update(injected(**variables))
    runpy.run_path(str(_FOLDER / "sitecustomize.py"))
