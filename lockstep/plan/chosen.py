"""Remembers which strategy `auto` has chosen in a launch: its restarts choose it without a trial.

The trial, a rehearsed step, is most of the time between a restarted rank's config and its groups.
What it depends on is the key: the config, the devices, the numbers of ranks, and the sizes of the
model, which may have been edited meanwhile.

Tests: tests/plan/test_auto.py
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.costs.hardware import GpuCluster
from lockstep.costs.steps import ModelSize
from lockstep.machine.environment import MEMORY, rank_facts
from lockstep.run_directory.run_files import replace_file

# the changes to a config's keys, and the reason
Chosen = tuple[Mapping[str, Any], str]


def recall(config: Config, cluster: GpuCluster, sizes: ModelSize) -> Chosen | None:
    """Return what this launch has chosen for these before; None: nothing."""
    path = _file(config, cluster, sizes)
    if path is None:
        return None
    with suppress(OSError):
        changes, reason = json.loads(path.read_text())
        return changes, reason
    return None


def remember(config: Config, cluster: GpuCluster, sizes: ModelSize, chosen: Chosen) -> None:
    """Keep what rank 0 has chosen for as long as the launch lasts."""
    path = _file(config, cluster, sizes)
    if path is not None and rank_facts().is_main:
        with suppress(OSError):  # the memory is full: a restart chooses again
            replace_file(path, json.dumps(chosen))


def _file(config: Config, cluster: GpuCluster, sizes: ModelSize) -> Path | None:
    """Return the file for these, in the folder that outlives the ranks; None: there is none."""
    folder = os.environ.get(MEMORY)
    if not folder:
        return None
    key = config.model_dump_json() + repr((cluster, sizes))
    return Path(folder, f"strategy-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json")
