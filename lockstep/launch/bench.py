"""Runs `lockstep bench scaling CONFIG`; its runs are forks of one process that has imported all.

Tests: tests/report/test_scaling.py
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from lockstep.config import load_config
from lockstep.launch.train import uses_compiler
from lockstep.prepared import fork_server
from lockstep.prepared.rank_starts import observes_itself, rank_starter
from lockstep.report import scaling


def run(
    what: str, path: Path, overrides: Sequence[str], *, ranks: str, steps: int, output: Path
) -> int:
    """Measure how a config scales, print a table, and write `output`.md and `output`.html."""
    counts = scaling.require_measurable(what, ranks, output)
    config = load_config(path, overrides)
    fresh = "" if observes_itself() else fork_server.split_off(compiles=uses_compiler(config))
    with rank_starter(fresh, _say, of_launchers=True) as start:
        return scaling.bench(path, overrides, ranks=counts, steps=steps, output=output, start=start)


def _say(line: str) -> None:
    print(f"lockstep: {line}", file=sys.stderr, flush=True)
