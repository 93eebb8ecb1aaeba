"""Runs a user's script as a rank.

The launcher starts `python -m lockstep.launch.script LOGS [-m] SCRIPT ARGS …`.
"""

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.launch.worker import run_as_worker


def run_script(script: str, arguments: Sequence[str], *, module: bool = False) -> None:
    """Run it in this process as `python SCRIPT ARGS` (or `python -m`) would."""
    sys.argv = [script, *arguments]
    try:
        if module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(script).parent.absolute()))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if error.code:
            raise  # `sys.exit()` and `sys.exit(0)` are a script's way to end well


def main() -> int:
    logs, *rest = sys.argv[1:]
    module = rest[0] == "-m"
    script, *arguments = rest[1:] if module else rest
    return run_as_worker(lambda: run_script(script, arguments, module=module), logs=Path(logs))


if __name__ == "__main__":
    sys.exit(main())
