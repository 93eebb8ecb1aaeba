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
from types import ModuleType
from typing import Any


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
                if "LOCKSTEP_OBSERVED_RUN" in os.environ:
                    from lockstep.verify.script.observe import observe_command

                    observe_command(os.environ["LOCKSTEP_OBSERVED_RUN"])
                else:
                    from lockstep.verify.watch import install

                    install()

            spec.loader.exec_module = observed  # type: ignore[method-assign]
        return spec


if "LOCKSTEP_OBSERVED_RUN" in os.environ or "LOCKSTEP_WATCHED_TRAINING" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
