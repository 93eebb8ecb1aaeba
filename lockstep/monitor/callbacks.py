"""The user's own callbacks: `monitor.callbacks: [package.module:Name]`, each called with every logged record.

A function is called with the record itself. A class is first made, with the spec's arguments, and the object is
called. An object whose attribute `every_rank` is true is called on every rank, any other on rank 0.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lockstep.config import MonitorConfig
from lockstep.config.objects import build_object, load_object
from lockstep.environment import rank_facts
from lockstep.errors import UsageError
from lockstep.records import StepRecord, append_line

Callback = Callable[[StepRecord], object]


def build_callbacks(config: MonitorConfig) -> list[tuple[str, Callback]]:
    """The callbacks by their names.

    Raises:
        UsageError: one can't be imported, made, or called.
    """
    built: list[tuple[str, Callback]] = []
    for number, spec in enumerate(config.callbacks):
        where = f"monitor.callbacks[{number}]"
        target = load_object(spec.name, where)
        made = inspect.isclass(target) or spec.args or spec.positional
        callback = build_object(spec, where) if made else target
        if not callable(callback):
            raise UsageError(
                f"{spec.name} can't be called", where=where, why="a callback is called with each step's record"
            )
        built.append((spec.name, callback))
    return built


class JsonLogger:
    """Writes records as lines of JSON to a file of its own.

    Args:
        path: the file, appended to; `{rank}` in it is replaced.
        name: put into every line as `name`, to tell runs apart.
        rank_filter: the rank or ranks that write; None: every rank.
    """

    every_rank = True

    def __init__(
        self, path: str = "metrics-{rank}.jsonl", name: str | None = None, rank_filter: int | Sequence[int] | None = 0
    ) -> None:
        rank = rank_facts().rank
        wanted = [rank_filter] if isinstance(rank_filter, int) else rank_filter
        self._writes = wanted is None or rank in wanted
        self._path = Path(path.replace("{rank}", str(rank)))
        self._extra: dict[str, Any] = {"rank": rank} if name is None else {"rank": rank, "name": name}
        if self._writes:
            self._path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, record: StepRecord) -> None:
        if self._writes:
            append_line(self._path, self._extra | record.as_dict())
