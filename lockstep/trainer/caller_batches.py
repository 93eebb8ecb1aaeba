"""Runs micro-batches that the caller passes on each rank.

They come from `Trainer.training_step`, and from loops over `lockstep.place`.

Micro-batch j of data-parallel rank r is number j × ranks + r of the step, under every strategy: its
random numbers, and the order in which losses are summed, follow from that number.

Tests: tests/trainer/test_loops.py, tests/trainer/test_own_loop.py
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config import TrainingConfig, require_equation
from lockstep.data import batch_length, move
from lockstep.data.batches import MicroBatch, num_tokens
from lockstep.errors import RunError, UsageError, warn_at_caller
from lockstep.layout import Layout
from lockstep.parallel.loss_accumulator import Loss, LossAccumulator
from lockstep.parallel.parallel_model import ParallelModel
from lockstep.process_group import collectives
from lockstep.process_group.collectives import is_main_process, object_device
from lockstep.run_directory.records import StepRecord
from lockstep.step import nominal_count
from lockstep.strategy import strategy_named
from lockstep.torch_compat.pytree import tree_leaves
from lockstep.trainer.evaluation import explain_bad_index
from lockstep.trainer.run_state import RunState


@dataclass
class OpenStep:
    """Counts the micro-batches that wait for their update.

    It knows no trainer, and so can outlive one.
    """

    calls: int = 0
    calls_per_step: int | None = None

    def sentence(self) -> str:
        """Return how many micro-batches wait; "" if none does."""
        waiting = (
            f"{self.calls} of {self.calls_per_step} micro-batches of a step wait for their update"
        )
        return waiting if self.calls else ""


class StepWindow:
    """Collects the micro-batches of one step, which the caller passes one at a time."""

    def __init__(self, run: RunState) -> None:
        self._run = run
        self._accumulator: LossAccumulator | None = None
        self.open_step = OpenStep()
        self._samples = self._micro_batches_per_step = 0
        self._has_warned = False
        self._last: Any = None

    def add(self, batch: Any, begin: Callable[[Any], None]) -> tuple[Tensor, StepRecord | None]:
        """Run forward and backward of this rank's next micro-batch.

        Return its mean loss, and the step's record.

        Before the first micro-batch of all, `begin` is called with it.
        """
        run = self._run
        step = self._run.step
        opened = self.open_step
        if step.placed.run_micro_batch is None:
            raise UsageError(
                f"{self._why_not()} micro-batches can't be run one at a time",
                fix="use Trainer.steps(data)",
            )
        batch = move(batch, run.cluster.device)
        if opened.calls_per_step is None:
            run.check_can_train()
            _warn_of_equal_batches(batch, run.layout)
            calls = _calls_in_a_step(run.config.training, batch, run.layout.data_parallel_size)
            begin(batch)
            opened.calls_per_step = calls
            self._micro_batches_per_step = calls * run.layout.data_parallel_size
        if step.nominal is None:
            step.set_nominal(batch, self._micro_batches_per_step)
        if self._accumulator is None:
            self._warn_of_end()
            run.modes.before_step(step.progress.step + 1)
            run.loss_check.check(
                [MicroBatch(0, batch)], self._micro_batches_per_step, step.progress.step
            )
            self._accumulator = step.open(self._micro_batches_per_step)
            self._samples = 0
        if step.stop_asked:
            self._accumulator.vote_to_stop()
        self._samples += batch_length(batch)
        self._last = batch
        is_last = opened.calls + 1 == opened.calls_per_step
        loss = self._pass(batch, real=True, last=is_last)
        opened.calls += 1
        record = self._update() if is_last else None
        # nan without a valid target, as torch has it
        return loss.summed() / torch.as_tensor(loss.targets), record

    def _why_not(self) -> str:
        """Return where micro-batches can't be run one at a time."""
        if strategy_named(self._run.layout.strategy).in_stages:
            return "under a pipeline"
        if self._run.step.placed.local_training is not None:
            return "where workers share a rank"
        return "for a loss over the whole batch"

    def _warn_of_end(self) -> None:
        """Warn once if the caller's loop goes on after the run's end."""
        run = self._run
        if not run.done or self._has_warned or not run.is_main_process:
            return
        self._has_warned = True
        why = "it was asked to stop"
        if run.results.stopped:
            why = run.results.why_stopped()
        elif not run.was_stopped:
            why = f"max_steps {run.step.total} are done"
        warn_at_caller(
            f"{why}, and the loop of training_step goes on: end it where trainer.done is true",
        )

    def warn_of_open_step(self, what: str) -> None:
        """Warn if micro-batches wait for an update, which `what` will not hold."""
        if waiting := self.open_step.sentence():
            warn_at_caller(
                f"{waiting}, which {what} does not hold: call trainer.flush() before it",
            )

    def flush(self) -> StepRecord | None:
        """Update with the micro-batches so far, and return the record; None if there are none."""
        if self._accumulator is None:
            return None
        # a dummy with weight zero starts the reduction over ranks
        self._pass(self._last, real=False, last=True)
        return self._update()

    def _pass(self, batch: Any, *, real: bool, last: bool) -> Loss:
        """Run a micro-batch forward and backward, as the number that this rank's next one has."""
        placed = self._run.step.placed
        step = self._run.step
        assert placed.run_micro_batch is not None
        assert self._accumulator is not None
        index, _ = placed.assign(self._micro_batches_per_step)[self.open_step.calls]
        micro_batch = MicroBatch(index, batch, real, num_tokens(batch))
        try:
            with placed.random_state.running("train", step.progress.step):
                return placed.run_micro_batch(micro_batch, self._accumulator, step.factor, last)
        except (IndexError, RuntimeError) as error:
            explain_bad_index(error, [micro_batch], step.progress.step)
            raise

    def _update(self) -> StepRecord:
        accumulator = self._accumulator
        samples = self._samples
        assert accumulator is not None
        self._accumulator = None
        self.open_step.calls = 0
        if self._run.layout.world_size > 1:
            samples = int(collectives.all_reduce(samples, op="sum"))
        return self._run.step.update(accumulator, samples)


def _calls_in_a_step(training: TrainingConfig, first: Any, ranks: int) -> int:
    """Return the number of micro-batches that each rank passes per step.

    `first` has their size if no setting has.
    """
    if training.global_batch_size is None:
        return training.accumulation
    size = training.batch_size if "batch_size" in training.model_fields_set else batch_length(first)
    require_equation(training, ranks, size)
    calls, rest = divmod(training.global_batch_size, size * ranks)
    if rest:
        raise UsageError(
            f"a step of {training.global_batch_size} samples is not a whole number of micro-batches"
            f" of {size} on each of {ranks} rank{'s' * (ranks != 1)}",
            where="training.global_batch_size",
            fix=(
                f"set it to a multiple of {size * ranks}, or use Trainer.steps(data), which shares"
                " out any number"
            ),
        )
    return calls


def _warn_of_equal_batches(batch: Any, layout: Layout) -> None:
    """Warn if two ranks pass the same first micro-batch.

    A loader without a sampler reads the same on all ranks.
    """
    if layout.data_parallel_size == 1:
        return
    digests: list[int] = [0] * layout.world_size
    dist.all_gather_object(digests, _digest(batch))
    if is_main_process() and len(set(digests)) < layout.data_parallel_size:
        warn_at_caller(
            "several ranks bring the same samples to training_step: they are trained on several"
            " times. Share them out: DataLoader(dataset,"
            " sampler=lockstep.DistributedSampler(dataset), …)",
        )


def _digest(batch: Any) -> int:
    """Return a checksum of the batch's tensors.

    Without tensors, a number that differs on every rank.
    """
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.layout == torch.strided]
    checksum = 0 if tensors else -1 - dist.get_rank()
    for tensor in tensors:
        checksum = zlib.crc32(
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(),
            checksum,
        )
    return checksum


_CALLS = ("backward", "evaluate")


class _Report(NamedTuple):
    step: int  # of its loop
    call: int  # index in `_CALLS`
    dp_rank: int  # its data-parallel rank
    num_batches: int  # number of micro-batches that it passes
    has_batch: int  # whether it has a micro-batch for a weightless copy
    targets: float  # rank 0: valid targets of the first one


class MicroBatchAssigner:
    """Numbers each rank's micro-batches, as all agreed.

    A rank with fewer runs weightless copies of an earlier one.
    """

    def __init__(self, placed: ParallelModel) -> None:
        self.placed = placed
        self.dp_size = placed.layout.data_parallel_size
        self.dp_rank = placed.assign(self.dp_size)[0][0]  # the ranks of one pipeline share it
        # divisor in backward, see `lockstep.step`; from the very first micro-batch
        self.nominal = 0.0
        self._last: list[Any] = []  # the newest micro-batch, once there is one

    def assign(self, batches: Sequence[Any], step: int, call: str) -> tuple[list[MicroBatch], int]:
        """Return this rank's micro-batches with their numbers, and how many all ranks have.

        They are those of `backward` or `evaluate`.
        """
        batches = [move(batch, self.placed.random_state.device) for batch in batches]
        self._last = batches[-1:] or self._last
        first = bool(batches) and self.nominal == 0 and self.placed.wants_data
        # host waits for the device, once
        targets = float(self.placed.objective.estimate(batches[0])) if first else 0.0
        mine = _Report(
            step, _CALLS.index(call), self.dp_rank, len(batches), bool(self._last), targets
        )
        rows = _reported(mine, self.placed)
        _require_agreement(rows)
        rounds = max(row.num_batches for row in rows)
        if rounds == 0:
            return [], 0
        if (
            unable := next((rank for rank, row in enumerate(rows) if not row.has_batch), None)
        ) is not None:
            what = f"rank {unable} brings no micro-batch, and has had none before"
            why = (
                "every rank takes part in each step, if only with a weightless copy of a"
                " micro-batch"
            )
            raise UsageError(
                what, why=why, fix="give each rank at least one micro-batch in its first step"
            )
        micro_batches_per_step = rounds * self.dp_size
        self.nominal = self.nominal or nominal_count(rows[0].targets, micro_batches_per_step)
        runs = [*batches, *self._last * (rounds - len(batches))]
        micro_batches = [
            MicroBatch(j * self.dp_size + self.dp_rank, batch, j < len(batches))
            for j, batch in enumerate(runs)
        ]
        return micro_batches, micro_batches_per_step


def _reported(mine: _Report, placed: ParallelModel) -> list[_Report]:
    """Return the reports of all ranks, by rank.

    The host does not wait for a device if the CPU has a process group.
    """
    if placed.layout.world_size == 1:
        return [mine]
    table = torch.zeros(placed.layout.world_size, len(mine), dtype=torch.float64)
    table[dist.get_rank()] = torch.tensor(mine, dtype=torch.float64)
    table = table.to(object_device(placed.random_state.device))
    dist.all_reduce(table)
    return [
        _Report(int(step), int(call), int(dp_rank), int(batches), int(has_batch), targets)
        for step, call, dp_rank, batches, has_batch, targets in table.tolist()
    ]


def _require_agreement(rows: Sequence[_Report]) -> None:
    """Raise an error if ranks are in different calls, or one pipeline's bring different counts."""
    places = [f"{_CALLS[row.call]} after step {row.step}" for row in rows]
    other = next((rank for rank, place in enumerate(places) if place != places[0]), None)
    if other is not None:
        why = "every rank goes through the same calls, or they wait for each other for ever"
        fix = (
            "make the same number of calls on all ranks; one that has no samples left calls"
            " backward()"
        )
        raise RunError(
            f"rank 0 is in {places[0]}, rank {other} in {places[other]}", why=why, fix=fix
        )
    for rank, row in enumerate(rows):
        first = next(other for other, its in enumerate(rows) if its.dp_rank == row.dp_rank)
        if rows[first].num_batches != row.num_batches:
            raise UsageError(
                f"ranks {first} and {rank} are one pipeline, and bring {rows[first].num_batches}"
                f" and {row.num_batches} micro-batches",
                fix=(
                    "bring the same micro-batches to all ranks of a pipeline: those of"
                    " placed.data_parallel_rank"
                ),
            )
