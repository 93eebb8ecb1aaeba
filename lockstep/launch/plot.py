"""Draws a run below the notebook's cell that spawned it, again each second, from its run directory.

IPython is not imported, only used where it runs: elsewhere one line says what to use instead.
"""

import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.report.read import read_run
from lockstep.report.sketch import sketch

SECONDS = 1.0


class LivePlot:
    """A figure in a cell's output.

    Args:
        run: the run directory, which need not be there yet.
    """

    def __init__(self, run: str | Path) -> None:
        self._run, self._begun = Path(run), time.time()
        self._handle: Any = None
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is None or not hasattr(shell, "kernel"):
            print(f"lockstep: this is no notebook, so plot={str(run)!r} shows nothing: lockstep report {run} --live")
            return
        shown = import_module("IPython.display")
        self._html: Any = shown.HTML
        self._handle = shown.display(shown.HTML(self._drawn()), display_id=True)

    def update(self) -> None:
        """Draw what the run directory has now."""
        if self._handle is not None:
            self._handle.update(self._html(self._drawn()))

    def _drawn(self) -> str:
        try:
            run = read_run(self._run)
        except UsageError:  # rank 0 has not made it yet
            return f"<p>{self._run.name}: starting</p>"
        if run.start.get("time", 0.0) < self._begun:  # of an earlier run in this folder
            return f"<p>{run.name}: starting</p>"
        return sketch(run)
