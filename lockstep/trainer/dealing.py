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
from lockstep.data.batches import MicroBatch
from lockstep.errors import RunError, UsageError
from lockstep.groups import object_device
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.step import nominal_count

_DOINGS = ("backward", "evaluate")


@dataclass
class _Row:
    """What one rank says."""

    step: int  # where it is
    doing: int  # of `_DOINGS`
    dp_rank: int  # its data-parallel rank
    held: int  # micro-batches that it brings
    able: bool  # it has something to run a weightless copy of
    count: float  # rank 0: valid targets of the first one

    @classmethod
    def read(cls, numbers: Sequence[float]) -> "_Row":
        step, doing, dp_rank, held, able, count = numbers
        return cls(int(step), int(doing), int(dp_rank), int(held), bool(able), count)

    def written(self) -> list[float]:
        return [self.step, self.doing, self.dp_rank, self.held, self.able, self.count]


@dataclass
class MicroBatchAssigner:
    """Numbers a rank's micro-batches.

    Attributes:
        placed: the model that they are for.
        nominal: what backward divides by, as `lockstep.step` has it; from the first micro-batch of all.
        dp_rank: this rank's data-parallel rank; the ranks of one pipeline share it.
    """

    placed: ParallelModel
    nominal: float = 0.0
    dp_rank: int = field(init=False)
    _last: list[Any] = field(default_factory=list)  # the newest micro-batch, once there is one

    def __post_init__(self) -> None:
        self.dp_rank = self.placed.assign(self.dp_size)[0][0]

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks."""
        return self.placed.layout.data_parallel_size

    def assign(self, batches: Sequence[Any], step: int, doing: str) -> tuple[list[MicroBatch], int]:
        """Number this rank's micro-batches; every rank calls it.

        Args:
            batches: this rank's.
            step: of the loop.
            doing: backward or evaluate.

        Returns:
            this rank's micro-batches, and their number over all ranks; none and 0 where no rank brings any.

        Raises:
            UsageError: the ranks of a pipeline bring different numbers of micro-batches, or a rank never had one.
            RunError: ranks are in different places of the loop.
        """
        batches = [move(batch, self.placed.random_state.device) for batch in batches]
        self._last = batches[-1:] or self._last
        first = bool(batches) and self.nominal == 0 and self.placed.wants_data
        count = float(self.placed.objective.estimate(batches[0])) if first else 0.0  # host waits for the device, once
        mine = _Row(step, _DOINGS.index(doing), self.dp_rank, len(batches), bool(self._last), count)
        rows = _told(mine, self.placed)
        _require_agreement(rows)
        rounds = max(row.held for row in rows)
        if rounds == 0:
            return [], 0
        _require_able(rows)
        micro_batches_per_step = rounds * self.dp_size
        self.nominal = self.nominal or nominal_count(rows[0].count, micro_batches_per_step)
        runs = [*batches, *self._last * (rounds - len(batches))]
        micro_batches = [
            MicroBatch(j * self.dp_size + self.dp_rank, batch, j < len(batches)) for j, batch in enumerate(runs)
        ]
        return micro_batches, micro_batches_per_step


def _told(mine: _Row, placed: ParallelModel) -> list[_Row]:
    """What all ranks say, by rank; hosts meet here, and no device is waited for where the CPU has a process group."""
    if placed.layout.world_size == 1:
        return [mine]
    numbers = mine.written()
    table = torch.zeros(placed.layout.world_size, len(numbers), dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor(numbers, dtype=torch.float64)
    table = table.to(object_device(placed.random_state.device))
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
        first = next(other for other, its in enumerate(rows) if its.dp_rank == row.dp_rank)
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
