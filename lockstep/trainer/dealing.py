"""Who runs which micro-batch where each rank brings its own: agreed on by all ranks before anything runs.

Micro-batch j of data-parallel rank r is number j × ranks + r of the step, under every strategy: what it draws at
random, and the order in which losses are summed, follow from that number. A rank that is short of one runs a
weightless copy of a micro-batch that it has had.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lockstep.data import move
from lockstep.errors import RunError, UsageError
from lockstep.groups import object_device
from lockstep.parallel.ledger import Share
from lockstep.parallel.placed import Placed
from lockstep.step import nominal_count

_DOINGS = ("backward", "evaluate")


@dataclass
class _Row:
    """What one rank says."""

    step: int  # where it is
    doing: int  # of `_DOINGS`
    column: int  # its data-parallel rank
    held: int  # micro-batches that it brings
    able: bool  # it has something to run a weightless copy of
    count: float  # rank 0: valid targets of the first one

    @classmethod
    def read(cls, numbers: Sequence[float]) -> "_Row":
        step, doing, column, held, able, count = numbers
        return cls(int(step), int(doing), int(column), int(held), bool(able), count)

    def written(self) -> list[float]:
        return [self.step, self.doing, self.column, self.held, self.able, self.count]


@dataclass
class Dealer:
    """Numbers a rank's micro-batches.

    Attributes:
        placed: the model that they are for.
        nominal: what backward divides by, as `lockstep.step` has it; from the first micro-batch of all.
        column: this rank's data-parallel rank; the ranks of one pipeline share it.
    """

    placed: Placed
    nominal: float = 0.0
    column: int = field(init=False)
    _last: list[Any] = field(default_factory=list)  # the newest micro-batch, once there is one

    def __post_init__(self) -> None:
        self.column = self.placed.assign(self.columns)[0][0]

    @property
    def columns(self) -> int:
        """Data-parallel ranks."""
        return self.placed.layout.data_parallel_size

    def deal(self, micro_batches: Sequence[Any], step: int, doing: str) -> tuple[list[Share], int]:
        """This rank's shares, and the slots of all ranks; none and 0 where no rank brings anything. All ranks call it.

        Args:
            micro_batches: this rank's.
            step: of the loop.
            doing: backward or evaluate; ranks that meet in different calls are told so.

        Raises:
            UsageError: the ranks of a pipeline bring different numbers of micro-batches, or a rank never had one.
            RunError: ranks are in different places of the loop.
        """
        batches = [move(batch, self.placed.cursor.device) for batch in micro_batches]
        self._last = batches[-1:] or self._last
        first = bool(batches) and self.nominal == 0 and self.placed.wants_data
        count = float(self.placed.objective.estimate(batches[0])) if first else 0.0  # host waits for the device, once
        mine = _Row(step, _DOINGS.index(doing), self.column, len(batches), bool(self._last), count)
        rows = _told(mine, self.placed)
        _require_agreement(rows)
        rounds = max(row.held for row in rows)
        if rounds == 0:
            return [], 0
        _require_able(rows)
        slots = rounds * self.columns
        self.nominal = self.nominal or nominal_count(rows[0].count, slots)
        runs = [*batches, *self._last * (rounds - len(batches))]
        shares = [Share(j * self.columns + self.column, batch, j < len(batches)) for j, batch in enumerate(runs)]
        return shares, slots


def _told(mine: _Row, placed: Placed) -> list[_Row]:
    """What all ranks say, by rank; hosts meet here, and no device is waited for where the CPU has a process group."""
    if placed.layout.world_size == 1:
        return [mine]
    numbers = mine.written()
    table = torch.zeros(placed.layout.world_size, len(numbers), dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor(numbers, dtype=torch.float64)
    table = table.to(object_device(placed.cursor.device))
    dist.all_reduce(table)
    return [_Row.read(numbers) for numbers in table.tolist()]


def _require_agreement(rows: Sequence[_Row]) -> None:
    places = [f"{_DOINGS[row.doing]} after step {row.step}" for row in rows]
    other = next((rank for rank, place in enumerate(places) if place != places[0]), None)
    if other is not None:
        raise RunError(
            f"rank 0 is in {places[0]}, rank {other} in {places[other]}",
            why="every rank goes through the same calls, or they wait for each other for ever",
            fix="make the same number of calls on all ranks; one that has no samples left calls backward()",
        )
    for rank, row in enumerate(rows):
        first = next(other for other, its in enumerate(rows) if its.column == row.column)
        if rows[first].held != row.held:
            raise UsageError(
                f"ranks {first} and {rank} are one pipeline, and bring {rows[first].held} and {row.held} micro-batches",
                fix="bring the same micro-batches to all ranks of a pipeline: those of placed.data_parallel_rank",
            )


def _require_able(rows: Sequence[_Row]) -> None:
    unable = next((rank for rank, row in enumerate(rows) if not row.able), None)
    if unable is not None:
        raise UsageError(
            f"rank {unable} brings no micro-batch, and has had none before",
            why="every rank takes part in each step, if only with a weightless copy of a micro-batch",
            fix="give each rank at least one micro-batch in its first step",
        )
