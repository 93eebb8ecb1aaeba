"""Describes one run of a script, for the process that makes it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

TASK = "task.pickle"


@dataclass(frozen=True)
class ScriptTask:
    """A run of a script in one world.

    Attributes:
        folder: receives the records.
        feed: (loader, batch) → the recorded batches (rank, index) whose samples it gets together.
        samples: the folder of the records that `feed` names.
        sizes: loader → batch size with which it is made.
        first: parameters with which the script starts; several: what each rank has, which one process joins.
        gradients: of each step, what the optimizer gets in place of those that were computed, as `first`.
        settings: of each step, of each parameter group, with which the optimizer steps.
        mean_draws: random numbers in forward and backward passes are the mean of their distribution.
        fixed_statistics: batch normalisation uses its running statistics.
        full_precision: nothing is converted to 16 bits.
        nudged: the last bits of the first parameters are changed.
    """

    script: str
    arguments: tuple[str, ...]
    steps: int
    folder: Path
    feed: Mapping[tuple[int, int], list[tuple[int, int]]] = field(default_factory=dict)
    samples: Path | None = None
    sizes: Mapping[int, int] = field(default_factory=dict)
    first: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    gradients: Sequence[Mapping[str, Sequence[Tensor]]] = ()
    settings: tuple[list[dict[str, Any]], ...] = ()
    mean_draws: bool = False
    fixed_statistics: bool = False
    full_precision: bool = False
    nudged: bool = False


def for_ranks(argument: str, ranks: int) -> str:
    """Replace `{n}` by the number of ranks, and `{16/n}` by a rank's share of 16."""
    return re.sub(r"\{(?:(\d+)/)?n\}", lambda found: str(int(found[1]) // ranks if found[1] else ranks), argument)
