"""Keeps the lines of a script at which it made, called and changed what a step is made of.

They are found by `lockstep/verify/own_lines.py` while the script runs, and name causes afterwards
(cause_lines.py).

Tests: tests/verify/test_own_lines.py, tests/verify/test_script.py
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class ScriptLines:
    """Keeps the lines at which one process of a script made, called and changed things."""

    # loader → where it is made, or where the script's own sampler or stream orders its samples
    loaders: dict[int, str] = field(default_factory=dict)
    reads: dict[int, str] = field(default_factory=dict)  # loader → where its last batch was read
    # first letters of its parameters' names → where a model was called last
    models: dict[str, str] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)  # the same → where the model was made
    wrapped: set[str] = field(default_factory=set)  # the same, of models whose wrapper reduces
    optimizers: list[str] = field(default_factory=list)  # where each is made
    schedule: str = ""  # where a learning rate schedule was stepped last
    loss: str = ""  # where a pipeline's loss is defined
    hook: str = ""  # where a communication hook was registered
    sharded: str = ""  # where FSDP was applied last
    seeds: list[tuple[str, str]] = field(default_factory=list)  # line and seed, in order

    def note_sharded(self, line: str) -> None:
        """Note where FSDP is applied to a module."""
        self.sharded = line

    def note_schedule(self, line: str) -> None:
        """Note where a learning rate schedule is stepped."""
        self.schedule = line

    def note_loss(self, line: str) -> None:
        """Note where a pipeline's loss is defined."""
        self.loss = line

    def note_hook(self, line: str) -> None:
        """Note where a communication hook is registered."""
        self.hook = line

    def of_parameter(self, lines: dict[str, str], name: str) -> str:
        """Return the line that is kept for the model of a parameter."""
        begins = [prefix for prefix in lines if name.startswith(prefix)]
        return lines[max(begins, key=len)] if begins else ""

    def is_wrapped(self, name: str) -> bool:
        """Return whether the gradient of a parameter is reduced by a wrapper of its model."""
        begins = [prefix for prefix in self.models if name.startswith(prefix)]
        return bool(begins) and max(begins, key=len) in self.wrapped


def seed_that_differs(ranks: Sequence[ScriptLines]) -> str:
    """Return the first line that seeds ranks otherwise; empty if none does."""
    for seeds in zip(*(lines.seeds for lines in ranks), strict=False):
        line: str = seeds[0][0]
        if any(seed != seeds[0][1] for _, seed in seeds):
            return line
    return ""


def seed_that_agrees(ranks: Sequence[ScriptLines]) -> str:
    """Return the last line that seeds ranks, if it seeds all alike; else empty."""
    last = [lines.seeds[-1] for lines in ranks if lines.seeds]
    if len(last) < len(ranks) or any(seed != last[0] for seed in last):
        return ""
    return last[0][0]
