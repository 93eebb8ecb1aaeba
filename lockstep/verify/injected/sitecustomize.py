"""Observes each Python process of a command that imports torch.

Python imports this file when it starts.

Only the folder of this file is on PYTHONPATH, and only for commands that `lockstep verify` or
`lockstep launch --watch-training` runs. Launchers import torch, too, but take no step, and so write
nothing.

Tests: tests/verify/test_script.py, tests/verify/test_watch.py
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_PACKAGE = Path(__file__).resolve().parents[2]


class _ThisLockstep:
    """Finds the package that this file is part of, as `lockstep`, and nothing that lies beside it.

    With its folder on PYTHONPATH another environment would get all packages of this one.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of `lockstep`; its modules are found by it."""
        if name != "lockstep":
            return None
        return importlib.util.spec_from_file_location(
            name, _PACKAGE / "__init__.py", submodule_search_locations=[str(_PACKAGE)]
        )


def _begin() -> None:
    """Begin what the command is run for."""
    if "LOCKSTEP_OBSERVED_RUN" in os.environ:
        from lockstep.verify.script.observed.observe import observe_command

        observe_command(os.environ["LOCKSTEP_OBSERVED_RUN"])
    else:
        from lockstep.verify.watch import install

        install()


class _AfterTorch:
    """Finds torch as others do, and begins to observe once it is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torch's own spec, whose loading begins the observation."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def observed(module: Any) -> None:
                run(module)
                try:
                    _begin()
                except ImportError as error:
                    # A script may run in an environment of its own, with another torch.
                    sys.exit(
                        f"lockstep: error: {sys.executable} can't observe a script: {error};"
                        " install Lockstep in its environment, too"
                    )

            spec.loader.exec_module = observed  # type: ignore[method-assign]
        return spec


if "LOCKSTEP_OBSERVED_RUN" in os.environ or "LOCKSTEP_WATCHED_TRAINING" in os.environ:
    sys.meta_path[:0] = [_ThisLockstep(), _AfterTorch()]
